"""Row-invariant CPU kernels that the embedded target and the drafter share. Floor 0; needs torch.

A package of its own, because drafter and verifier may not import each other and both need these.
"""

__all__: list[str] = []
