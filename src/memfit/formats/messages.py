"""Error messages about memory, found in texts of any length: PyTorch's of every version, and its neighbours'.

Examples:
    >>> text = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity; 7 bytes free)"
    >>> [(message.kind, message.sizes["requested"]) for message in read_text_messages(text)]
    [('torch-oom', 2147483648)]
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Literal

from memfit.formats.messages_devices import Process, Reading
from memfit.formats.messages_lines import Line, RawLine, block_text, clean_line, read_blocks

Role = Literal["failure", "warning", "fact"]
"""A failure or a warning asks for an explanation; a fact helps with others'."""

MOST_FOLLOWING = 200
MOST_BEFORE = 60
MOST_MESSAGES = 400
MOST_JOINED = 1 << 14
MOST_READS = 2000
"""How often one signature is read in a text; a log that repeats an error more often has it by then."""
WHOLE_MESSAGE_CHARACTERS = 200
"""A line of this length has a message's numbers in itself, so the same line is the same message."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A line that may begin a message, with what stands around it."""

    line: Line
    before: Sequence[str]
    after: Sequence[str]

    def joined(self, lines: int = 14) -> str:
        """The line and those that follow it as one text of at most 16 KiB."""
        return " ".join((self.line.text, *(text.strip() for text in self.after[:lines])))[:MOST_JOINED]

    def joined_tightly(self, lines: int = 4) -> str:
        """As `joined`, for texts that a terminal broke inside words."""
        return "".join((self.line.text, *self.after[:lines]))[:MOST_JOINED]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        kind: what it is, such as "torch-oom".
        role: failure, warning or fact.
        framework: whose it is.
        form: which of the framework's formats.
        sizes: amounts by name, in bytes.
        figures: other numbers by name.
        words: texts by name.
        processes: what it says of who holds memory.
        reading: what an nvidia-smi table in the text says.
        misread: names of amounts that are no amounts, with the negative number that each was.
        before: lines before it, for the traceback.
        line: where it stands.
        ranks: which ranks printed it.
        count: how often it stands there.
        input: name of the input that it is from.
    """

    kind: str
    role: Role = "failure"
    framework: str
    form: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[Process, ...] = ()
    reading: Reading | None = None
    misread: Mapping[str, int] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    line: int = 0
    ranks: tuple[int, ...] = ()
    count: int = 1
    input: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for the same message printed again or by another rank on the same device."""
        return (
            self.kind,
            self.form,
            tuple(sorted(self.sizes.items())),
            tuple(sorted(self.figures.items())),
            tuple(sorted(self.words.items())),
            self.processes,
            self.reading is None or self.line,
            tuple(sorted(self.misread.items())),
        )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How a message is recognized.

    Attributes:
        trigger: what its first line has in it, in lower case; found by plain search, so a log of any size
            is gone through in linear time.
        read: the message that begins there; None where it is another.
        follows: how many lines after the first it may need.
    """

    trigger: str
    read: Callable[[Passage], Message | None]
    follows: int = 14


def read_messages(stream: IO[bytes], signatures: Sequence[Signature] | None = None) -> tuple[Message, ...]:
    """The messages of a text, each once, in order of their first line; memory stays bounded.

    Args:
        stream: the text, in UTF-8 or UTF-16; bytes that are no text do no harm.
        signatures: what to look for; everything that is known where None.
    """
    if signatures is None:
        from memfit.formats.messages_table import SIGNATURES

        signatures = SIGNATURES
    found: dict[tuple[object, ...], Message] = {}
    for message, rank in _scan(read_blocks(stream), signatures):
        known = found.get(message.identity)
        if known is None:
            if len(found) < MOST_MESSAGES:
                found[message.identity] = replace(message, ranks=() if rank is None else (rank,))
            continue
        ranks = known.ranks if rank is None else tuple(sorted({*known.ranks, rank}))
        found[message.identity] = replace(known, ranks=ranks, count=known.count + 1)
    return tuple(found.values())


def read_text_messages(text: str) -> tuple[Message, ...]:
    """The messages of a text that is at hand."""
    return read_messages(io.BytesIO(text.encode("utf-8", "surrogatepass")))


def _scan(
    blocks: Iterator[Sequence[RawLine]], signatures: Sequence[Signature]
) -> Iterator[tuple[Message, int | None]]:
    """Blocks without a trigger are only passed over: a log of any size costs little more than to read it."""
    before: deque[RawLine] = deque(maxlen=MOST_BEFORE)
    reads = [0] * len(signatures)
    known: dict[tuple[int, str], Message | None] = {}
    for block, following in _with_following(blocks):
        text = block_text(block)
        likely = [place for place, signature in enumerate(signatures) if signature.trigger in text]
        if not likely:
            before.extend(block[-MOST_BEFORE:])
            continue
        rest = [clean_line(*raw) for raw in (*block, *following)]
        for at in range(len(block)):
            line = rest[at]
            lowered = line.text.lower()
            for place in likely:
                if signatures[place].trigger not in lowered:
                    continue
                key = (place, line.text)
                if key in known:
                    message = known[key]
                elif reads[place] >= MOST_READS:
                    continue
                else:
                    reads[place] += 1
                    message = signatures[place].read(
                        _passage(line, before, rest, at, signatures[place].follows)
                    )
                    if len(line.text) >= WHOLE_MESSAGE_CHARACTERS:
                        known[key] = message
                if message is not None:
                    yield replace(message, line=line.number, before=_clean(before)), line.rank
            before.append(block[at])


def _clean(lines: Iterable[RawLine]) -> tuple[str, ...]:
    return tuple(clean_line(*raw).text for raw in lines)


def _passage(line: Line, before: Iterable[RawLine], rest: Sequence[Line], at: int, follows: int) -> Passage:
    """Lines of other ranks between a message's own are left out."""
    after = rest[at + 1 : at + 1 + follows * (1 if line.rank is None else 8)]
    own = [other.text for other in after if line.rank is None or other.rank in (None, line.rank)]
    return Passage(line=line, before=_clean(before), after=own[:follows])


def _with_following(
    blocks: Iterator[Sequence[RawLine]],
) -> Iterator[tuple[Sequence[RawLine], Sequence[RawLine]]]:
    """Blocks of lines, each with the lines that follow it."""
    block = next(blocks, ())
    while block:
        following = next(blocks, ())
        yield block, following[:MOST_FOLLOWING]
        block = following
