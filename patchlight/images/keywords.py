"""What a photo shows, as keywords that photo libraries read: dc:subject in XMP, and the keywords of IPTC.

Those that a photo has stay before the new ones. Nothing here imports torch.
"""

import re
from collections.abc import Sequence
from html import escape

_PACKET = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">%s</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)
_SUBJECT = (
    '<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:subject><rdf:Bag>%s</rdf:Bag>'
    "</dc:subject></rdf:Description>"
)

_KEYWORD, _CHARACTERS = b"\x1c\x02\x19", b"\x1c\x01\x5a"
"""How IPTC begins a keyword, and what says which characters it uses;"""
_UTF8 = b"\x1b%G"
"""these."""
_LONGEST = 64
"""Bytes of a keyword in IPTC."""


def with_keywords(xmp: bytes | None, words: Sequence[str]) -> bytes:
    """An XMP packet with these among its keywords; a new one where there is none, or none that can be added to."""
    text = None if xmp is None else xmp.decode("utf-8", "replace").rstrip("\0")
    items = {word: f"<rdf:li>{escape(_plain(word))}</rdf:li>" for word in words}
    if text is None or "</rdf:RDF>" not in text:
        return (_PACKET % (_SUBJECT % "".join(items.values()))).encode()
    # No tag holds another, so that each is looked at once: a packet of nothing but openings would take hours else.
    bag = re.search(r"<dc:subject\b[^<>]*>\s*<rdf:(?:Bag|Seq)\b[^<>/]*>", text)
    end = None if bag is None else re.compile(r"</rdf:(?:Bag|Seq)>").search(text, bag.end())
    if bag is None or end is None:
        # An empty one would be a second of its name.
        text = re.sub(r"<dc:subject\b[^<>]*(?:(?<=/)>|>\s*<rdf:Bag\s*/>\s*</dc:subject>)", "", text)
        at = text.rindex("</rdf:RDF>")
        return (text[:at] + _SUBJECT % "".join(items.values()) + text[at:]).encode()
    there = text[bag.end() : end.start()]
    new = "".join(item for item in items.values() if item not in there)
    return (text[: end.start()] + new + text[end.start() :]).encode()


def with_iptc_keywords(iptc: bytes | None, words: Sequence[str]) -> bytes:
    """An IPTC block with these among its keywords."""
    block = iptc or _CHARACTERS + len(_UTF8).to_bytes(2, "big") + _UTF8
    coding = "utf-8" if _CHARACTERS in block else "latin-1"
    for word in words:
        spelt = _plain(word).encode(coding, "replace")[:_LONGEST].decode(coding, "ignore").encode(coding)
        record = _KEYWORD + len(spelt).to_bytes(2, "big") + spelt
        if record not in block:
            block += record
    return block


def _plain(word: str) -> str:
    """Without what XML cannot hold."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]", " ", word).strip()
