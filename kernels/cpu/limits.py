"""What the C kernels lack, in numbers that a configuration knows. Imports without torch."""

LANES = 16  # numbers that kernels compute at once


def attention_lacks(key_dim: int, value_dim: int) -> str | None:
    """Why the kernels cannot compute attention with heads of these sizes; None: they can."""
    if key_dim != value_dim:
        return f"values of another size than keys ({value_dim}, {key_dim})"
    return f"a head size that is no multiple of {LANES} ({key_dim})" if key_dim % LANES else None
