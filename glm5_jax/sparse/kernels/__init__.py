"""Pallas kernels of DeepSeek Sparse Attention for TPUs."""
