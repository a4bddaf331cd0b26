"""Host memory that a GPU copies from and to."""

import ctypes
import mmap
import weakref

import torch

SMALL = 2**20  # bytes; torch's own allocator rounds each block up to a power of two, which costs little here


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Zeros in host memory for copies from and to the device, in bytes: page-locked where that is a GPU.

    Blocks are of the size asked for: in torch's allocator of page-locked memory the fp32 matrices of Qwen2.5-7B nearly
    double.

    Raises:
        torch.cuda.CudaError: the memory cannot be page-locked.
        OSError: there is too little of it.
    """
    if device.type != "cuda" or size <= SMALL:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    memory, cudart = mmap.mmap(-1, size), torch.cuda.cudart()
    view = (ctypes.c_char * size).from_buffer(memory)
    buffer = torch.frombuffer(view, dtype=torch.uint8)
    if int(code := cudart.cudaHostRegister(buffer.data_ptr(), size, 0)):  # type: ignore[attr-defined]
        raise torch.cuda.CudaError(int(code))

    def unlock(
        address: int, mapped: mmap.mmap
    ) -> None:  # `mapped` stays until then: memory is unlocked before it is unmapped
        cudart.cudaHostUnregister(address)  # type: ignore[attr-defined]

    weakref.finalize(view, unlock, buffer.data_ptr(), memory).atexit = False
    return buffer
