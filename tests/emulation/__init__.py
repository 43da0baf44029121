"""Kernels on emulated processors, under QEMU: Arm with NEON, x86 with AVX2 and with SSE4.2 alone.

For correctness only, and not part of ``make test``. ``make test-arm`` fetches what it takes (``setting_up.py``).
"""
