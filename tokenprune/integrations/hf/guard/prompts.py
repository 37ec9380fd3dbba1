# SPDX-License-Identifier: Apache-2.0
"""Classify English prompts: questions about text, locations or counts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenprune.integrations.hf.guard.settings import KINDS

# Instructions about the format of the answer, which many benchmarks add to every question. They are removed first.
_FORMS = (
    r"\b(?:single|one|a|few|your own|short|more|following|\d+)\s+words?\b(?:\s+or\s+(?:a\s+)?(?:short\s+)?phrases?)?",
    r"\b(?:option|choice|correct|right|best|answer|capital)(?:'s|’s)?\s+letters?\b",
    r"\bletters? of (?:the )?(?:correct|right|best|option|answer|choice|your)\b",
    r"\bwith (?:the|a|its) (?:letter|number|text|word)\b",
    r"\b(?:the|a) (?:right|correct) (?:answer|option|choice|one)\b",
    r"\b(?:is|are|was|were|have|has) left\b(?! of)",
    r"\b(?:all|is it|that's|that is|are you|am i) right\b|\bright (?:now|away|answer|after)\b",
)
PATTERNS: Mapping[str, Sequence[str]] = {
    "text": (
        r"\b(?:texts?|words?|letters?|digits?|numerals?|handwriting|handwritten|writings?|written|wrote|printed)\b",
        r"\b(?:inscriptions?|captions?|headlines?|headings?|subtitles?|titles?|titled|labels?|labell?ed|slogans?)\b",
        r"\b(?:ocr|transcri(?:be|ption)|spell(?:s|ed|ing)?|abbreviations?|initials|acronyms?|logos?|brands?)\b",
        r"\b(?:says?|saying|reads?|reading)\b(?!\s+(?:a|an|his|her|their|glasses|lamp|something|in|on|to)\b)",
        r"\bsign(?:s|age)?\b.*\b(?:say|read|mean|advertis|point|warn|tell)|\bwhat (?:\w+ )?signs? (?:is|are)\b",
        r"\b(?:invoices?|receipts?|documents?|letterhead|memos?|e-?mails?|charts?|graphs?|plots?|diagrams?"
        r"|axis|axes|legends?|screenshots?|web ?sites?|web ?pages?|urls?|pages?|paragraphs?|menus?|posters?)\b",
        r"\b(?:in|from|of|this|following) (?:the )?(?:tables?|forms?)\b"
        r"|\btables? (?:as|into|in|rows?|columns?|cells?)\b|\bextract\w*\b|\b(?:book|magazine|album|front) cover\b",
        r"\b(?:prices?|priced|costs?|totals?(?! numbers?)|subtotals?|amounts?|percent(?:age)?s?|values?|how much)\b",
        r"\b(?:dates?|dated|deadlines?|what (?:year|month|day|time)|which (?:year|month)|when (?:is|was|does|did) the"
        r"|expir\w+)\b",
        r"\b(?:speed limit|(?:what|which) (?:street|avenue|road|station|gate)|(?:phone|telephone|fax|house|model"
        r"|serial|flight|bus|train|jersey|page|account|plate|room|street|player) numbers?"
        r"|numbers? (?:is |are )?(?:on|printed|written|shown|displayed|listed)|(?:what|which|the) numbers?(?! of\b))\b",
        r"\bwhat(?:'s| is| are| was)? (?:the )?(?:full |first |last |company |brand |store |street |team )?names?\b"
        r"|\bnames? of (?:the |this )?(?:\w+ )?(?:stores?|shops?|streets?|restaurants?|compan\w+|books?|authors?"
        r"|hotels?|banks?|teams?|airlines?|brands?|products?|players?|persons?|university|organi[sz]ations?)\b",
        r"\b(?:licen[cs]e plates?|zip ?codes?|address(?:es)?|signature|signed|author|password|barcode|scoreboard"
        r"|score)\b",
        r"\b(?:tiny|tiniest|fine print|small print)\b",
    ),
    "grounding": (
        r"\bwhere(?:'s|’s| is| are| was| were| in| on| can| do| does| did| at| exactly)\b|\bwhereabouts\b",
        r"\b(?:locat(?:e|es|ed|ion|ions|ing)|positions?|positioned|coordinates?|bounding|bbox(?:es)?)\b",
        r"\bpoint(?:s|ing)? (?:to|at|out)\b|<(?:ref|box|loc|grounding|point)>",
        r"\b(?:detect|segment|mark|outline|highlight|ground|refer to|referring) (?:the|all|every|each)\b",
        r"\b(?:left|leftmost|rightmost|upper|lower|topmost|bottommost|top|bottom|foreground|background)\b",
        r"\b(?:(?:the|to|on|far|its|his|her|your) right|right[- ](?:of|side|hand|most|corner))\b|\bright \w+\?",
        r"\b(?:above|below|beneath|underneath|under|behind|in front of|next to|beside|between|near(?:est)?|closest"
        r"|adjacent|opposite|corners?|which side|what side)\b",
    ),
    "counting": (
        r"\bhow many\b",
        r"\bcount(?:s|ed|ing)?\b(?! on\b)",
        r"(?<!phone )(?<!model )(?<!serial )(?<!house )(?<!account )(?<!page )(?<!fax )\bnumbers? of\b",
        r"\b(?:is|are) there (?:exactly |at least |more than |fewer than |less than |only )?(?:two|three|four|five|six"
        r"|\d+)\b",
        r"\b(?:more|fewer|less|as many) [\w ]+? than\b|\bas many\b",
    ),
}
_FORM = re.compile("|".join(_FORMS), re.IGNORECASE)


class KindReader:
    """Classifies the questions of a text.

    Args:
        patterns: Additional regular expressions by kind, see `Guard.patterns`.
    """

    def __init__(self, patterns: Mapping[str, Sequence[str]] | None = None) -> None:
        patterns = patterns or {}
        self._built_in = {kind: re.compile("|".join(PATTERNS[kind]), re.IGNORECASE) for kind in KINDS}
        self._custom = {kind: [re.compile(text, re.IGNORECASE) for text in patterns.get(kind, ())] for kind in KINDS}

    def kinds(self, text: str) -> tuple[str, ...]:
        """Return the kinds of questions in `text`, in the order of `KINDS`."""
        question = _FORM.sub(" ", text)
        return tuple(
            kind
            for kind in KINDS
            if self._built_in[kind].search(question) or any(pattern.search(text) for pattern in self._custom[kind])
        )
