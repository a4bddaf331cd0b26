"""Which part of a model's answer is text: without thoughts and framing sentences; refusals have none.

A phrase that the source text has, too, belongs to the text.
"""

import re
from dataclasses import replace

from cpt.contrib.rewriting.model import Answer

TAG = r"(?:\w+:)?(?:think|thinking|thought|thoughts|reasoning)"
# A tag in quotes or within a line is mentioned by the text.
OPEN_TAG = re.compile(rf"^[ \t]*(?:<{TAG}>|\[THINK\])", re.IGNORECASE | re.MULTILINE)
CLOSE_TAG = re.compile(rf"(?<![`'\"“«])(?:</{TAG}>|\[/THINK\])(?![`'\"”»])", re.IGNORECASE)
CHANNEL = re.compile(r"\A\s*(?:<\|start\|>assistant)?<\|channel\|?>")
FINAL = re.compile(r"<\|channel\|>final[^<]*<\|message\|>|<channel\|>")
END = re.compile(r"<\|(?:end|return)\|>.*\Z", re.DOTALL)
PLAIN_CHANNELS = re.compile(
    r"\Aanalysis(?=\S).*?assistantfinal", re.DOTALL
)  # without its special tokens
FENCE = re.compile(r"\A```(?:markdown|md|text|txt|plaintext)?[ \t]*\n(.*)\n```\Z", re.DOTALL)

SURE = (
    r"(?:sure(?: thing)?|certainly|of course|absolutely|gladly"
    r"|natürlich|gerne|selbstverständlich|bien sûr|certainement"
    r"|¡?claro(?: que sí)?|por supuesto|certo|certamente|com certeza|конечно|当然(?:可以)?|もちろん(?:です)?)"
)
HERE = (
    r"(?:here(?:'s| is| are)|below (?:is|are)|i(?:'ve| have) (?:rewritten|rephrased|reworded|simplified)"
    r"|hier (?:ist|sind)|voici|aquí (?:está|están|tienes|tiene)|ecco|aqui (?:está|estão)|вот|以下是|以下は)"
)
REWORDED = (
    r"(?:rewritten|rewrite|reworded|rephrased|paraphrased|paraphrase|simplified"
    r"|you requested|you asked|as requested"
    r"|(?:your|provided|given|original) (?:text|passage|document|article)|(?:from|of|about|based on|on) the text\b"
    r"|the text in \w+|(?:clear|easy|scholarly) (?:prose|words|version|text)"
    r"|umgeschrieben|umformuliert|überarbeitet|réécrit|reformulé|reescrit|reformulad|riscritt|riformulat"
    r"|переписанн|переформулированн|改写|重写|書き直|書き換え)"
)
OPENINGS = [
    re.compile(
        rf"\A{SURE}[!.,:！。，]?[ \t]*(?:\n|{HERE}[^\n:：]{{0,160}}[:：])\s*", re.IGNORECASE
    ),
    re.compile(rf"\A{HERE}(?=[^\n:：]{{0,160}}{REWORDED})[^\n:：]{{0,200}}[:：]\s*", re.IGNORECASE),
]
CLOSING = re.compile(
    r"\n\s*[(*_]*(?:(?:please )?let me know (?:if|whether)|i hope (?:this|that|it) helps"
    r"|feel free to|would you like me to"
    r"|if you(?:'d like| would like| need| want| have any)[^\n]*(?:let me know|changes|adjust|further)"
    r"|note: (?:i|this (?:version|rewrit\w+|text))\b|is there anything else|lass(?:en sie)? (?:es )?mich wissen"
    r"|n'hésitez pas|¿?(?:te|le) gustaría que|déjame saber|fammi sapere|me avise se"
    r"|дайте знать|如果你?您?(?:需要|还有)"
    r")[^\n]{0,250}\Z",
    re.IGNORECASE,
)
# The answer of an assistant that speaks about its task, without a text that could be separated.
SPEECH = re.compile(
    rf"\A(?:{SURE}[!,.]? i(?:'d be|'ll| would be| will| can)\b"
    r"|please (?:provide|share|paste) (?:me )?(?:with )?the text"
    r"|i (?:don't|do not) see (?:any|a|the) (?:text|document)|as requested, i)",
    re.IGNORECASE,
)
HELP_VERBS = (
    r"(?:(?:help|assist) (?:you |with )|assist\b|fulfill|comply|rewrite|do that|process (?:this|that|the|your)"
    r"|complete (?:this|that|your)|(?:provide|create|generate|produce|write|continue|engage|discuss) (?:\w+ )?"
    r"(?:this|that|content|rewrit|information|instructions|assistance|text))"
)
CANNOT = r"(?:i (?:can't|cannot|can not|won't|will not)(?: be able to)?|i(?:'m| am) (?:unable|not able) to)"
REFUSALS = [
    re.compile(
        r"\A(?:(?:i'm|i am)(?: really| very| so)? sorry|sorry"
        r"|i apologi[sz]e|my apologies|unfortunately)?[,.!:]?\s*(?:but )?"
        rf"{CANNOT} (?:\w+ )?{HELP_VERBS}",
        re.IGNORECASE,
    ),
    re.compile(
        r"\A[^.!?\n]{0,60}\bas an ai\b(?: language)?(?: model| assistant)?,? i\b", re.IGNORECASE
    ),
    re.compile(
        r"\A(?:(?:es )?tut mir (?:sehr )?leid|entschuldigung)\b[^.!?\n]{0,20}ich (?:kann|darf)"
        r"[^.!?\n]*\bnicht\b[^.!?\n]*"
        r"(?:helfen|umschreiben|bearbeiten|erfüllen|unterstützen|beantworten)",
        re.IGNORECASE,
    ),
    re.compile(
        r"\A(?:je suis )?(?:vraiment )?désolée?\b[^.!?\n]{0,20}je ne (?:peux|suis)[^.!?\n]*"
        r"(?:aider|répondre|réécrire|satisfaire|accéder|traiter)",
        re.IGNORECASE,
    ),
    re.compile(
        r"\A(?:lo siento|lo lamento|mi dispiace|desculpe|sinto muito)\b[^.!?\n]{0,20}(?:no puedo|non posso|não posso)"
        r"[^.!?\n]*(?:ayudar|cumplir|reescribir|procesar|aiutar|riscrivere|soddisfare|ajudar|reescrever|atender)",
        re.IGNORECASE,
    ),
    re.compile(
        r"\A(?:извините|к сожалению|простите)[^.!?\n]{0,10}я не могу"
        r"[^.!?\n]*(?:помочь|выполнить|переписать)",
        re.I,
    ),
    re.compile(
        r"\A(?:很?抱歉|对不起)[^。\n]{0,12}(?:无法|不能)[^。\n]*(?:帮助|提供|改写|满足|处理|协助)"
    ),
    re.compile(r"\A申し訳(?:ありません|ございません)[^。\n]*(?:できません|できかねます|お手伝い)"),
]
APOLOGY = re.compile(
    r"sorry|apolog|regret|unable|can't|cannot|tut mir leid|désolé|lo siento|dispiace|desculp|извин|抱歉|申し訳",
    re.IGNORECASE,
)


def clean(answer: Answer, source: str) -> Answer:
    """Return the answer without thoughts and framing, or with its flaw; `source` is the text that was sent."""
    if answer.flaw is not None:
        return answer
    text, removed = without_thoughts(answer.text.strip())
    if removed and not text:
        return replace(answer, text="", flaw="only thoughts")
    if is_refusal(text, source):
        return replace(answer, text="", flaw="refusal")
    framed = without_framing(text, source)
    if framed != text:
        removed += ("framing sentences",)
    plain = plain_apostrophes(framed)
    if (not framed and text) or (
        SPEECH.match(plain) and not SPEECH.search(plain_apostrophes(source))
    ):
        return replace(answer, text="", flaw="framing sentences without a text")
    return replace(answer, text=framed, removed=answer.removed + removed)


def without_thoughts(text: str) -> tuple[str, tuple[str, ...]]:
    """The text, and the notation of the thoughts that were removed."""
    plain = PLAIN_CHANNELS.match(text)
    if plain:
        return text[plain.end() :].strip(), ("thoughts in channels",)
    if CHANNEL.match(text) or "<|end|><|start|>assistant<|channel|>final<|message|>" in text:
        finals = list(FINAL.finditer(text))
        final = text[finals[-1].end() :] if finals else ""
        return END.sub("", final).strip(), ("thoughts in channels",)
    remaining = text
    position = 0
    while (opened := OPEN_TAG.search(remaining, position)) is not None:
        if remaining[: opened.start()].count("```") % 2:  # code
            position = opened.end()
            continue
        closed = CLOSE_TAG.search(remaining, opened.end())
        if closed is None:
            # At the beginning: cut off. Later on, a line that begins with a tag is text.
            if opened.start() == 0:
                remaining = ""
            break
        remaining = remaining[: opened.start()] + remaining[closed.end() :]
    closed = CLOSE_TAG.search(remaining)
    if closed is not None and not re.search(
        rf"<{TAG}>|\[THINK\]", remaining[: closed.start()], re.IGNORECASE
    ):
        # The chat template has opened it.
        remaining = remaining[closed.end() :]
    if remaining == text:
        return text, ()
    return remaining.strip(), ("thoughts in tags",)


def is_refusal(text: str, source: str) -> bool:
    plain = plain_apostrophes(text)
    if not any(refusal.match(plain) for refusal in REFUSALS):
        return False
    # A source that apologizes may be rewritten as an apology.
    return not APOLOGY.search(plain_apostrophes(source))


def without_framing(text: str, source: str) -> str:
    """The text without a fence around all of it, and without sentences to the user before and after it."""
    source = plain_apostrophes(source)
    text = without_fence(text)
    for opening in OPENINGS:
        begin = opening.match(plain_apostrophes(text))
        if begin and begin[0].strip().casefold() not in source.casefold():
            text = text[begin.end() :]
    closing = CLOSING.search(plain_apostrophes(text))
    while closing and not CLOSING.search("\n" + source.rstrip().rpartition("\n")[2]):
        text = text[: closing.start()].rstrip()
        closing = CLOSING.search(plain_apostrophes(text))
    return without_fence(text.strip())


def without_fence(text: str) -> str:
    fence = FENCE.match(text)
    if fence and "```" not in fence[1]:
        return fence[1].strip()
    return text


def plain_apostrophes(text: str) -> str:
    return text.replace("’", "'")
