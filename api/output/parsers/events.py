"""The events that a model's output is read into, in order."""

from typing import NamedTuple


class Text(NamedTuple):
    """Part of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """Part of the reasoning."""

    text: str


class CallStart(NamedTuple):
    """A call begins; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments' JSON of the call that began last."""

    text: str


Event = Text | Reasoning | CallStart | CallArguments


def joined(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind merged."""
    if len(events) < 2:
        return events
    merged: list[Event] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case (Text(before), Text(text)):
                merged[-1] = Text(before + text)
            case (Reasoning(before), Reasoning(text)):
                merged[-1] = Reasoning(before + text)
            case (CallArguments(before), CallArguments(text)):
                merged[-1] = CallArguments(before + text)
            case _:
                merged.append(event)
    return merged
