"""Library functions by name: which give a row the same bits however many rows there are."""

from __future__ import annotations

from typing import Any

# Any other function, such as of a package that a hook calls, may vary.
_MOVES = """
    __getitem__ __setitem__ __get__ __set__ __len__ __bool__ __int__ __float__ __index__ __iter__ __contains__
    __format__ __repr__ __reversed__ __hash__ item tolist size dim ndimension numel nelement element_size
    stride storage_offset get_device is_contiguous is_floating_point is_complex is_tensor
    is_grad_enabled detach _set_grad_enabled requires_grad promote_types result_type broadcast_shapes to type
    type_as float half bfloat16 double long int short bool cpu cuda contiguous clone copy dropout arange linspace
    zeros ones empty full eye tensor as_tensor zeros_like ones_like empty_like full_like new_zeros new_ones
    new_empty new_full new_tensor zero fill view reshape view_as reshape_as flatten unflatten ravel squeeze
    unsqueeze expand expand_as broadcast_to broadcast_tensors permute transpose swapaxes swapdims movedim moveaxis t
    adjoint chunk split split_with_sizes tensor_split unbind narrow select slice cat concat concatenate stack hstack
    vstack dstack pad roll flip tile repeat repeat_interleave meshgrid diagonal diag_embed tril triu index_select
    index_copy index_fill index_put index_add index gather take take_along_dim scatter scatter_add masked_fill
    masked_select masked_scatter where nonzero embedding one_hot unfold view_as_real view_as_complex real imag
"""
_COMPARES = """
    eq ne lt le gt ge equal not_equal less less_equal greater greater_equal __eq__ __ne__ __lt__ __le__ __gt__
    __ge__ __and__ __or__ __xor__ __invert__ __iand__ __ior__ __rand__ __ror__ __lshift__ __rshift__ logical_and
    logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite isin any
    all max min maximum minimum fmax fmin amax amin argmax argmin topk sort argsort kthvalue searchsorted bucketize
    unique bincount count_nonzero clamp clip clamp_min clamp_max cummax cummin
"""
_COMPUTES = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod addcmul addcdiv lerp neg
    negative positive abs absolute sign square sqrt reciprocal exp expm1 log log2 log10 log1p sin cos tan tanh asin
    acos atan asinh erf erfc ceil floor round trunc frac relu relu6 leaky_relu hardtanh hardswish hardsigmoid
    softsign threshold nan_to_num polar __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__
    __imul__ __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __neg__
    __pos__ __abs__
"""
_SUMS = """
    sum mean var std var_mean norm vector_norm prod cumsum cumprod diff softmax log_softmax logsumexp layer_norm
    rms_norm _fused_rms_norm normalize glu
"""
_INVARIANT = frozenset(f"{_MOVES} {_COMPARES} {_COMPUTES} {_SUMS}".split())
# Measured: functions with other bits where a vector of the processor is not full, in 16 bits and in float32
_HALF = frozenset(("rsqrt", "pow", "__pow__", "logit", "nanmean"))
_SINGLE = frozenset(("sigmoid", "silu", "softplus", "exp2", "logit", "pow", "__pow__", "mish", "elu", "celu", "selu"))
_SINGLE |= {"sinh", "cosh", "atanh", "atan2"}


def of_torch(operation: Any) -> bool:
    """Whether an operation of torch.ops is torch's own, or one of this package's."""
    name = getattr(operation, "_qualified_op_name", None) or getattr(operation, "namespace", "aten")
    return str(name).split("::")[0] in ("aten", "prims", "selfspec")


def row_invariant(name: str, bits: int | None = None, exponent: object = None) -> bool:
    """Whether a function of this name, of torch, of a tensor or of aten, gives a row the same bits beside any others.
    bits: of the floating point numbers it is given, 0 for others, None for any; exponent: of a power."""
    name = name.removeprefix("linalg_")
    name = name if name.startswith("__") else name.rstrip("_")
    if name not in _HALF | _SINGLE or bits is None:
        return name in _INVARIANT
    whole = name in ("pow", "__pow__") and type(exponent) in (int, float) and exponent in (1, 2, 3)
    return whole or name not in {16: _HALF, 32: _SINGLE}.get(bits, ())
