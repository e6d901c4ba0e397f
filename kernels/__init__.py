"""Kernels: functions of tensors, without config or model."""
