// CUDA for a torch that was built without it: hooks and a device guard that do nothing. Preloaded, they let fake tensors
// on device cuda run forward and backward passes, streams and events. Real tensors on cuda still cannot exist.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device FIRST_GPU(c10::DeviceType::CUDA, 0);
int recorded;  // events need an address

struct FakeHooks : at::CUDAHooksInterface {
  FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, FIRST_GPU, id); }

struct FakeGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  mutable c10::Stream current = stream(0);
  mutable c10::StreamId streams = 0;
  c10::Device getDevice() const override { return FIRST_GPU; }
  c10::Device exchangeDevice(c10::Device) const override { return FIRST_GPU; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return current; }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++streams); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++streams); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    c10::Stream before = current;
    current = next;
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

FakeGuard guard;

}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::FakeHooks)
}

extern "C" void set_device_guard() {
  c10::impl::device_guard_impl_registry[static_cast<int>(c10::DeviceType::CUDA)].store(&guard);
}
