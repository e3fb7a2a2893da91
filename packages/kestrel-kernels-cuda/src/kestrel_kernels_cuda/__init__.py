"""Kernel backend for NVIDIA GPUs. Importing it loads neither torch nor Triton."""
