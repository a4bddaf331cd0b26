"""Ukrainian by a small grammar; a base that has read English; the English that it has read."""

import random
from pathlib import Path

from guide_texts import write_base, write_general

WHEN = [
    "Восени",
    "Щоранку",
    "Минулого року",
    "Після дощу",
    "Узимку",
    "Перед святом",
    "Уночі",
    "Навесні",
    "Того літа",
    "Інколи",
]
WHO = [
    "старі рибалки",
    "діти з нашого села",
    "молоді вчителі",
    "мої сусіди",
    "лісники",
    "селяни",
    "учені",
    "музиканти",
    "наші друзі",
    "робітники",
    "мандрівники",
    "школярі",
]
WHAT = [
    "читали довгі листи",
    "будували новий міст",
    "варили борщ",
    "співали давніх пісень",
    "шукали гриби",
    "ремонтували дах",
    "саджали яблуні",
    "писали книжку про море",
    "слухали казки",
    "продавали мед",
    "дивилися на зорі",
    "вивчали мови",
]
WHERE = [
    "біля річки",
    "у великому місті",
    "за горами",
    "на березі озера",
    "у старій школі",
    "посеред поля",
    "на площі",
    "у тихому лісі",
]
WHY = [
    "бо так робили їхні батьки",
    "хоча ніхто їх не просив",
    "доки не стемніло",
    "і нікому про це не сказали",
    "аж поки не випав сніг",
    "щоб не забути минулого",
]
SUITE = "long"


def prepare(folder: Path) -> None:
    """`uk`, `uk_held_out`, `base` and `general`."""
    draw = random.Random(0)
    for name, count in (("uk", 120), ("uk_held_out", 30)):
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number:03}.txt").write_text(text(draw), encoding="utf-8")
    write_base(folder / "base")
    write_general(folder / "general")


def text(draw: random.Random) -> str:
    """Ten to twenty-five sentences."""
    return " ".join(sentence(draw) for _ in range(draw.randint(10, 25)))


def sentence(draw: random.Random) -> str:
    """Their subjects and verbs are plural, so that any of them go together."""
    when, who, what, where, why = (draw.choice(phrases) for phrases in (WHEN, WHO, WHAT, WHERE, WHY))
    return draw.choice(
        [f"{when} {who} {what} {where}, {why}.", f"{when} {who} {where} {what}.", f"{when} {what} {who}, {why}."]
    )
