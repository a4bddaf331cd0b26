"""Host memory that a GPU copies from and to."""

import mmap
import weakref

import torch


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Zeros in host memory for copies from and to the device, in bytes: page-locked where that is a GPU.

    torch's allocator of page-locked memory rounds each block up to a power of two: the fp32 matrices of Qwen2.5-7B nearly double.

    Raises:
        torch.cuda.CudaError: the memory cannot be page-locked.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    memory, cudart = mmap.mmap(-1, size), torch.cuda.cudart()
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if int(code := cudart.cudaHostRegister(buffer.data_ptr(), size, 0)):  # type: ignore[attr-defined]
        raise torch.cuda.CudaError(int(code))
    weakref.finalize(memory, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False  # type: ignore[attr-defined]
    return buffer
