"""What the C kernels lack, in numbers that a configuration knows. Imports without torch."""

LANES = 16  # numbers that kernels compute at once


def attention_lacks(key_dim: int, value_dim: int) -> str | None:
    """Why the kernels cannot compute attention with heads of these sizes; None: they can."""
    odd = next((dim for dim in (key_dim, value_dim) if dim % LANES), None)
    return None if odd is None else f"a head size that is no multiple of {LANES} ({odd})"
