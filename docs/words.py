"""Count phrases that are hard to read: `python -m docs.words [FILE ...]`, all prose of the repository by default.

A hit is a place to look at, not an error. CONTRIBUTING.md asks for plain English: short, active, the usual word.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHRASES = {  # what to write instead -> what to find
    "reports, prints, warns": r"\b(?:told|tells?)\b",
    "continues, resumes": r"\b(?:go(?:es)?|gone|going|went) on\b",
    "next to, compared with": r"\bbeside\b",
    "evaluates, checks": r"\bjudg(?:es?|ed|ing)\b",
    "is in": r"\b(?:stands|stood|lies)\b(?! for)",
    "the positive form": r"\b(?:nobody|nothing that|none that|that there (?:is not|are not|is none))\b",
    "a verb": r"(?:^|[.;:] )(?:Whoever|Whose|Of (?:a|the|its|all|each))\b",
    "automatically; delete it": r"\b(?:by itself|by themselves|of (?:its|their|your|our) own)\b",
    "the usual word": r"\b(?:mend(?:s|ed)?|anew|in vain|thereby|likewise|so many|for want of)\b",
    "skipped, excluded": r"\bleft out\b",
    "metric, number, result": r"\bfigures?\b",
    "out of memory, does not fit": r"\b(?:memory ended|there is (?:no )?room)\b",
}
GROUPS = {
    "README and docs": ["README.md", "docs/**/*.md"],
    "cpt": ["cpt/**/*.py"],
    "recipes, launch files, profiles": ["recipes/**/*.yaml", "launch/**/*.yaml", "*/README.md"],
}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of text: of Markdown outside code, of Python strings and comments, of YAML comments."""
    lines, is_code = path.read_text(encoding="utf-8").splitlines(), False
    strings: set[int] = set()
    if path.suffix == ".py":
        constants = (
            node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Constant)
        )
        texts = [one for one in constants if isinstance(one.value, str) and " " in one.value]
        strings = {
            line for one in texts for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
        }
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif path.suffix == ".md" and not is_code or number in strings:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)
        elif path.suffix != ".md" and "# " in line:
            yield number, line.partition("# ")[2]


def main() -> None:
    named = [Path(name) for name in sys.argv[1:]]
    groups = {
        title: [path for one in globs for path in sorted(ROOT.glob(one))]
        for title, globs in GROUPS.items()
    }
    for title, paths in {"files": named}.items() if named else groups.items():
        counts, words = Counter[str](), 0
        for path in paths:
            for number, line in prose(path):
                words += len(line.split())
                for better, phrase in PHRASES.items():
                    if found := re.findall(phrase, line):
                        counts[better] += len(found)
                        if named:
                            print(f"{path}:{number}: {', '.join(found)} -> {better}")
        print(
            f"{title}: {counts.total()} in {words:,} words ({1000 * counts.total() / max(1, words):.1f} per 1,000)"
        )
        print(*(f"  {count:4} {better}" for better, count in counts.most_common(5)), sep="\n")


if __name__ == "__main__":
    main()
