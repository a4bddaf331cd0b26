"""The simple commands in a piece of shell: words and nothing else, without redirections, variables in front, loops and
comments."""

import re
import shlex
from collections.abc import Iterator

HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?^\s*\1$", re.S | re.M)
ERRORS_TO = re.compile(r"\s2>\s*(&1|\S+)|\s&>\s*\S+")
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
IN_FRONT = {"do", "then", "else", "time", "nohup", "exec", "env", "sudo", "!", "{", "if", "while", "until"}
"""Words that a command may follow."""
ENDS = {"done", "fi", "}", "esac", "for"}


def simple_commands(script: str) -> Iterator[list[str]]:
    """The words of each command, in order.

    Raises:
        ValueError: a quotation that does not end.
    """
    for line in whole_lines(HEREDOC.sub("", script)):
        command: list[str] = []
        skip = False
        for word in words_of(ERRORS_TO.sub(" ", line)):
            if skip:
                skip = False
            elif set(word) <= set("<>&") and set(word) & set("<>"):
                skip = True
            elif set(word) <= set("();|&"):
                yield from without_what_is_in_front(command)
                command = []
            else:
                command.append(word)
        yield from without_what_is_in_front(command)


def whole_lines(script: str) -> Iterator[str]:
    """Lines, each with those that it goes on in."""
    begun = ""
    for line in script.splitlines():
        begun += line
        if begun.endswith("\\"):
            begun = begun.removesuffix("\\") + " "
            continue
        try:
            words_of(begun)
        except ValueError:
            begun += "\n"
            continue
        yield begun
        begun = ""
    if begun.strip():
        words_of(begun)
        yield begun


def words_of(line: str) -> list[str]:
    """As the shell takes the line apart."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    return list(reader)


def without_what_is_in_front(words: list[str]) -> Iterator[list[str]]:
    """The command itself, if there is one."""
    while words and (words[0] in IN_FRONT or ASSIGNED.match(words[0])):
        words = words[1:]
    if words and words[0] not in ENDS:
        yield words
