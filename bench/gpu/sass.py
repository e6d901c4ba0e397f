"""What can be read off the machine code (SASS) of a kernel without running it: the work of its main loop, and how many
loads wait for each other."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\b(U?[RP]\d+)(\.64)?\b")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_COPY = "LDGSTS"  # from global to shared memory
_LOADS = ("LDG.", "LD.", "ATOM")
_FROM_SHARED = ("LDS", "LDSM")
_STORES = ("ST", "RED", "BRA", "EXIT", "BAR", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "BSYNC", "NOP", "MEMBAR", "CCTL")
_SHAPE = re.compile(r"(?:HMMA\.(\d{2})(\d)(\d+)|[HQ]GMMA\.(\d+)x(\d+)x(\d+))")


class Instruction(NamedTuple):
    address: int
    predicate: str  # the register that decides whether it runs; empty: it always runs
    opcode: str  # with its modifiers
    operands: tuple[str, ...]


class Body(NamedTuple):
    """The work of one pass through some instructions, of one warp."""

    instructions: int
    copied: int  # bytes from global to shared memory
    loaded: int  # bytes from global memory to registers
    operations: int  # multiplications and additions of tensor cores


class Code(NamedTuple):
    """A kernel."""

    main: Body  # the loop with most work of tensor cores, else of most loads; without a loop the whole kernel
    outside: Body  # the instructions that are in no loop
    chain: int  # the most loads from global memory of which each waits for the one before
    is_warpgroup: bool  # its tensor core instructions are those of warp groups (HGMMA)


def parse(text: str) -> tuple[Instruction, ...]:
    """text: of `cuobjdump --dump-sass`."""
    found = []
    for match in _LINE.finditer(text):
        operands = tuple(part.strip() for part in match[4].split(",")) if match[4].strip() else ()
        found.append(Instruction(int(match[1], 16), match[2] or "", match[3], operands))
    return tuple(found)


def loops(code: Iterable[Instruction]) -> list[tuple[int, int]]:
    """(first, last address) of every backward branch, the shortest first. A branch to itself, which ends a kernel, is
    none."""
    found = set()
    for each in code:
        target = _TARGET.search(each.operands[-1]) if each.opcode.startswith("BRA") and each.operands else None
        if target is not None and int(target[1], 16) < each.address:
            found.add((int(target[1], 16), each.address))
    return sorted(found, key=lambda loop: loop[1] - loop[0])


def _innermost(code: Iterable[Instruction]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for loop in loops(code):
        if not any(loop[0] <= first and last <= loop[1] for first, last in found):
            found.append(loop)
    return found


def body(code: Iterable[Instruction]) -> Body:
    code = tuple(code)
    copied = sum(32 * _width(each.opcode) for each in code if each.opcode.startswith(_COPY))
    loaded = sum(32 * _width(each.opcode) for each in code if each.opcode.startswith("LDG."))
    return Body(len(code), copied, loaded, sum(map(_operations, code)))


def read(text: str) -> Code:
    code = parse(text)
    bodies = [body(each for each in code if first <= each.address <= last) for first, last in _innermost(code)]
    every = loops(code)
    outside = body(each for each in code if not any(first <= each.address <= last for first, last in every))
    main = max(bodies, key=lambda each: (each.operations, each.copied + each.loaded), default=body(code))
    return Code(main, outside, chain(code), any(each.opcode.startswith(("HGMMA", "QGMMA")) for each in code))


def chain(code: Iterable[Instruction]) -> int:
    """Follows the instructions once, in their order, in which a warp issues them: one that takes the result of a load
    waits for it, and so do all after it. Loads that are issued without such a wait between them count once. The next
    load from shared memory waits for copies to there; those of an innermost loop are for its later iterations."""
    code = tuple(code)
    inner = _innermost(code)
    ready: defaultdict[str, int] = defaultdict(int)  # register → the number of waits after which it is there
    shared = now = last = 0
    for each in code:
        is_store = each.opcode.startswith(_STORES)
        is_copy = each.opcode.startswith((_COPY, "UTMALDG"))
        taken = each.operands if is_store or is_copy else each.operands[1:]
        now = max([now, ready[each.predicate], *(ready[name] for operand in taken for name in _registers(operand))])
        if each.opcode.startswith(_FROM_SHARED):
            now = max(now, shared)
        if is_copy:
            if not any(first <= each.address <= end for first, end in inner):
                shared = last = max(shared, now + 1)
        elif not is_store:
            is_load = each.opcode.startswith(_LOADS)
            for name in _written(each):
                ready[name] = now + is_load
            last = max(last, now + is_load)
    return max(now, last)


def _written(each: Instruction) -> list[str]:
    """The registers that it writes. The predicates that a comparison writes come first as well."""
    found: list[str] = []
    for operand in each.operands[:2]:
        if operand in ("PT", "UPT", "RZ", "URZ"):
            continue
        match = _REGISTER.fullmatch(operand)
        if match is None or (found and not match[1].startswith(("P", "UP"))):
            break
        name = match[1]
        found.append(name)
        if name.startswith("R"):
            found += [f"R{int(name[1:]) + i}" for i in range(1, _num_written(each.opcode))]
        elif name.startswith("UR"):
            found += [f"UR{int(name[2:]) + i}" for i in range(1, 2)]
    return found


def _num_written(opcode: str) -> int:
    if "GMMA" in opcode:
        return 128
    if opcode.startswith("HMMA") or ".128" in opcode or opcode.startswith("LDSM"):
        return 4
    return 2 if ".64" in opcode or ".WIDE" in opcode else 1


def _registers(operand: str) -> list[str]:
    """Those of a pair that `.64` names, too."""
    found = []
    for match in _REGISTER.finditer(operand):
        found.append(match[1])
        if match[2] and match[1].startswith("R"):
            found.append(f"R{int(match[1][1:]) + 1}")
    return found


def _width(opcode: str) -> int:
    """Bytes of a thread."""
    for name, width in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)):
        if name in opcode:
            return width
    return 4


def _operations(each: Instruction) -> int:
    match = _SHAPE.search(each.opcode)
    if match is None:
        return 0
    if match[1]:  # such as HMMA.16816: 16 × 8 × 16
        return 2 * int(match[1]) * int(match[2]) * int(match[3])
    return 2 * int(match[4]) * int(match[5]) * int(match[6]) // 4  # by four warps together
