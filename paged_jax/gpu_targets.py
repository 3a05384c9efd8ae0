"""GPUs as XLA's compiler wants them described, to compile for one that is not there."""

from __future__ import annotations

# What XLA wants to know of the device, from NVIDIA's data sheet and its table of compute
# capability 9.0.
H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
GPU_TARGETS = {"h200": H200}
# What compiles for them, and needs no GPU.
REMEDY = (
    "compiling for a GPU needs wheels that need no GPU: pip install --no-deps jax-cuda13-plugin "
    "jax-cuda13-pjrt (of jax's own version) nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink "
    "nvidia-cuda-nvdisasm"
)
