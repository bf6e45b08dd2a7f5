"""Rotary embedding and RMS norm, in place, computed in float32."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    cosine, sine = (half[:, None].float() for half in cos_sin_cache[positions.flatten()].chunk(2, -1))
    turned = cosine.shape[-1]
    for heads in (query, key):
        if heads is None:
            continue
        seen = heads.view(positions.numel(), -1, head_size)[..., : 2 * turned]
        first, second = (seen[..., :turned], seen[..., turned:]) if is_neox else (seen[..., ::2], seen[..., 1::2])
        first, second = first.float(), second.float()
        pair = first * cosine - second * sine, second * cosine + first * sine
        seen.copy_(torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2))


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    wide = x.float()
    out.copy_((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)
