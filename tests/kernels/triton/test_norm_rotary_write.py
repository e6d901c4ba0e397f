import pytest
import torch

from pagewire.kernels.triton.norm_rotary_write import norm_rotary_write, rotary_table

BIG = torch.cuda.is_available()
# heads, kv_heads, dim
HEADS = [(16, 8, 128), (32, 8, 128), (40, 8, 64)] if BIG else [(4, 2, 16), (3, 1, 32), (20, 20, 16)]
TOKENS = 200 if BIG else 5
BLOCKS, PAGE, EPS = (40, 64, 1e-6) if BIG else (5, 16, 1e-6)
MAX_LEN = 5000


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def expected(x, norm, rotary, positions):
    """x: [tokens, heads, dim]; the norm rounds twice, to x's type. Result in float64."""
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    low, high = x.double().chunk(2, dim=-1)
    cos, sin = rotary[positions.long()].double()[:, None].chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def gathered(pages, slots):
    """The stored heads at these slots: [tokens, kv_heads, dim] float32."""
    slots = slots.long()
    return pages.float()[slots // PAGE, :, slots % PAGE]


class Case:
    """Random states; token 1 has no slot."""

    def __init__(self, device, dtype, heads, kv_heads, dim, *, normed, page_dtype=None, value_dim=None):
        """value_dim: None: dim."""
        value_dim = value_dim or dim
        self.heads, self.kv_heads = heads, kv_heads
        width = (heads + kv_heads) * dim + kv_heads * value_dim
        self.qkv = torch.randn(TOKENS, width + 16, device=device).to(dtype)[:, :width]
        self.norms = tuple(torch.randn(dim, device=device).to(dtype) for _ in range(2)) if normed else None
        inverse = 1 / 10000 ** (torch.arange(0, dim, 2, device=device) / dim)
        self.rotary = rotary_table(inverse, 1.0, MAX_LEN)
        self.positions = torch.randint(0, MAX_LEN, (TOKENS,), dtype=torch.int32, device=device)
        self.slots = torch.randperm(BLOCKS * PAGE)[:TOKENS].int().to(device)
        self.slots[1] = -1
        self.q_out = torch.full((TOKENS, heads, dim), torch.nan, dtype=dtype, device=device)
        shape = (BLOCKS, kv_heads, PAGE * (dim + value_dim))  # a page holds keys and values
        pages = torch.full(shape, torch.nan, device=device).to(page_dtype or dtype).flatten(1)
        both = pages.split((kv_heads * PAGE * dim, kv_heads * PAGE * value_dim), dim=1)
        self.pages = [part.unflatten(1, (kv_heads, PAGE, -1)) for part in both]

    def run(self, scales=(1.0, 1.0)):
        norm_rotary_write(
            self.qkv, self.norms, EPS, self.rotary, self.positions, self.slots, self.q_out, *self.pages, scales
        )

    def expected(self):
        """Queries, keys and values of all tokens."""
        dim, value_dim = self.q_out.shape[2], self.pages[1].shape[3]
        widths = (self.heads * dim, self.kv_heads * dim, self.kv_heads * value_dim)
        parts = zip(self.qkv.split(widths, dim=1), (self.heads, self.kv_heads, self.kv_heads), strict=True)
        query, key, value = (part.unflatten(1, (num, -1)) for part, num in parts)
        norms = self.norms or (None, None)
        keys = expected(key, norms[1], self.rotary, self.positions)
        return expected(query, norms[0], self.rotary, self.positions), keys, value.double()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dtype", "max_error"), [(torch.float32, 1e-6), (torch.float16, 5e-4), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_states_are_normed_rotated_and_stored(device, dtype, max_error, heads, kv_heads, dim, normed):
    case = Case(device, dtype, heads, kv_heads, dim, normed=normed)
    case.run()
    query, key, value = case.expected()
    stored = case.slots >= 0
    assert error(case.q_out, query) < max_error
    assert error(gathered(case.pages[0], case.slots)[stored], key[stored]) < max_error
    assert torch.equal(gathered(case.pages[1], case.slots)[stored].double(), value[stored])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(80, 80), (12, 12), (24, 16), (16, 24), (192, 128), (512, 512)])
def test_heads_of_any_even_size(device, dim, value_dim, normed):
    case = Case(device, torch.float32, 3, 2, dim, normed=normed, value_dim=value_dim)
    case.run()
    query, key, value = case.expected()
    stored = case.slots >= 0
    assert error(case.q_out, query) < 1e-6
    assert error(gathered(case.pages[0], case.slots)[stored], key[stored]) < 1e-6
    assert torch.equal(gathered(case.pages[1], case.slots)[stored].double(), value[stored])
    num_written = sum((~part.isnan()).sum().item() for part in case.pages)
    assert num_written == stored.sum().item() * 2 * (dim + value_dim), "nothing beyond the heads"


def test_weights_of_float32_and_heads_that_do_not_turn(device):
    """Heads that are normed and not rotated, which some layers of Gemma have, are rounded once."""
    heads, kv_heads, dim = HEADS[0]
    case = Case(device, torch.bfloat16, heads, kv_heads, dim, normed=True)
    case.norms = tuple(torch.randn(dim, device=device) for _ in range(2))
    case.rotary = rotary_table(torch.zeros(0, device=device), 1.0, 1, dim)
    case.positions.zero_()
    case.run()
    wide = case.qkv[:, : heads * dim].unflatten(1, (heads, dim)).double()
    exact = case.norms[0] * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    assert (case.q_out == exact.bfloat16()).float().mean() > 0.995


@pytest.mark.parametrize(("turning", "dim"), [(2, 16), (8, 16), (12, 16), (20, 80), (64, 192)])
def test_only_the_first_features_turn(device, turning, dim):
    heads, kv_heads, _ = HEADS[0]
    case = Case(device, torch.float32, heads, kv_heads, dim, normed=False)
    inverse = 1 / 10000 ** (torch.arange(0, turning, 2, device=device) / turning)
    case.rotary = rotary_table(inverse, 1.5, MAX_LEN, dim)
    norm_rotary_write(
        case.qkv, None, EPS, case.rotary, case.positions, case.slots, case.q_out, *case.pages, turning=turning
    )
    query, key, _ = case.qkv.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
    table = rotary_table(inverse, 1.5, MAX_LEN)
    stored = case.slots >= 0
    for states, out in ((query, case.q_out), (key, gathered(case.pages[0], case.slots))):
        exact = torch.cat((expected(states[..., :turning], None, table, case.positions), states[..., turning:]), dim=-1)
        assert error(out[stored], exact[stored]) < 1e-6


def test_only_the_given_slots_are_written(device):
    case = Case(device, torch.bfloat16, *HEADS[0], normed=True)
    case.run()
    pages = torch.stack(case.pages)
    written = ~pages.float().isnan().any(-1).transpose(2, 3).flatten(1, 2)  # [2, slots, kv_heads]
    expected_written = torch.zeros_like(written)
    expected_written[:, case.slots[case.slots >= 0].long()] = True
    assert torch.equal(written, expected_written)


@pytest.mark.parametrize("normed", [False, True])
def test_fp8_pages_hold_scaled_and_clamped_states(device, normed):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a type of sm_89")
    case = Case(device, torch.bfloat16, *HEADS[0], normed=normed, page_dtype=torch.float8_e4m3fn)
    case.qkv[0, -1] = 3000.0  # out of range at its scale
    scales = 0.01, 0.02
    case.run(scales)
    stored = case.slots >= 0
    for pages, wanted, scale in zip(case.pages, case.expected()[1:], scales, strict=True):
        out = gathered(pages, case.slots)[stored]
        rounded = (wanted[stored] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert (out == rounded).float().mean() > 0.98
        assert error(out, rounded.double()) < 0.02


def test_rotated_scores_depend_only_on_the_distance(device):
    """The table and the rotation together: q(m) · k(n) depends on m - n."""
    case = Case(device, torch.float32, *HEADS[0], normed=False)
    case.qkv[:] = case.qkv[0]
    case.positions[:4] = torch.tensor([10, 7, 1010, 1007])
    case.slots[:4] = torch.tensor([0, 1, 2, 3])
    case.run()
    keys = gathered(case.pages[0], case.slots)
    near, far = ((case.q_out[i, 0] * keys[i + 1, 0]).sum() for i in (0, 2))
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)
