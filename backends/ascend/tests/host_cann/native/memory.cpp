// Device memory: one reserved address range per device, so that a host pointer is never taken for a device pointer.
// Addresses are never handed out twice: whoever keeps a freed pointer is told so, for ever. Fresh memory is poisoned.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "host.h"

namespace host {
namespace {

constexpr size_t DEVICE_RANGE = 1ull << 40;
constexpr int POISON = 0xFF;  // NaN in every floating format, -1 in every integer format
constexpr int MAX_DEVICES = 8;

struct Allocation {
    size_t bytes;
    bool live;
};

std::mutex mutex;
char *range = nullptr;
size_t top[MAX_DEVICES], used[MAX_DEVICES];
std::map<uintptr_t, Allocation> allocations;
std::map<uintptr_t, size_t> pinned;

bool reserve() {
    if (range != nullptr) return true;
    void *found = mmap(nullptr, DEVICE_RANGE * MAX_DEVICES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    range = static_cast<char *>(found);
    return true;
}

int32_t device_of(const void *address) {
    return static_cast<int32_t>((static_cast<const char *>(address) - range) / DEVICE_RANGE);
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

aclError allocate(void **address, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    int32_t device = current_device();
    if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc before aclrtSetDevice");
    size_t total = static_cast<size_t>(atoll(getenv("HOST_CANN_MEMORY_BYTES")));
    if (used[device] + bytes > total || !reserve())
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc of %zu bytes: device %d has %zu of %zu left", bytes, device,
                    total - used[device], total);
    // A page of its own that stays unmapped stands between two allocations, so that a wild access ends the process.
    size_t pages = round_up(bytes ? bytes : 1, 4096);
    if (top[device] + pages + 4096 > DEVICE_RANGE) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "address range used up");
    char *start = range + device * DEVICE_RANGE + top[device];
    top[device] += pages + 4096;
    if (mprotect(start, pages, PROT_READ | PROT_WRITE)) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "mprotect failed");
    memset(start, POISON, pages);
    allocations[reinterpret_cast<uintptr_t>(start)] = {bytes, true};
    used[device] += bytes;
    *address = start;
    log({ALLOCATE, EXECUTED, device, -1, {reinterpret_cast<int64_t>(start), static_cast<int64_t>(bytes)}});
    return ACL_SUCCESS;
}

const char *name_of(aclrtMemcpyKind kind) {
    switch (kind) {
        case ACL_MEMCPY_HOST_TO_HOST: return "host to host";
        case ACL_MEMCPY_HOST_TO_DEVICE: return "host to device";
        case ACL_MEMCPY_DEVICE_TO_HOST: return "device to host";
        case ACL_MEMCPY_DEVICE_TO_DEVICE: return "device to device";
        default: return "of an unknown kind";
    }
}

aclError check_side(const void *address, size_t bytes, bool on_device, const char *what, aclrtMemcpyKind kind) {
    if (on_device) return check_device_range(address, bytes, -1, what);
    if (is_device(address))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "copy %s: the %s %p is device memory", name_of(kind), what, address);
    return ACL_SUCCESS;
}

aclError check_copy(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind) {
    if (kind > ACL_MEMCPY_DEVICE_TO_DEVICE)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "copy of kind %d is not emulated; name a direction", static_cast<int>(kind));
    if (bytes > room)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "copy %s: %zu bytes into room for %zu", name_of(kind), bytes, room);
    bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    if (aclError code = check_side(to, bytes, to_device, "destination", kind)) return code;
    return check_side(from, bytes, from_device, "source", kind);
}

aclError copy(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind) {
    if (aclError code = check_copy(to, room, from, bytes, kind)) return code;
    memmove(to, from, bytes);
    return ACL_SUCCESS;
}

Entry copy_entry(void *to, const void *from, size_t bytes, aclrtMemcpyKind kind, bool asynchronous, int32_t stream) {
    int64_t host_pinned = kind == ACL_MEMCPY_HOST_TO_DEVICE   ? is_pinned(from)
                          : kind == ACL_MEMCPY_DEVICE_TO_HOST ? is_pinned(to)
                                                              : -1;
    return {COPY, EXECUTED, current_device(), stream,
            {static_cast<int64_t>(kind), static_cast<int64_t>(bytes), reinterpret_cast<int64_t>(to),
             reinterpret_cast<int64_t>(from), asynchronous, host_pinned}};
}

}  // namespace

bool is_device(const void *address) {
    auto *byte = static_cast<const char *>(address);
    return range != nullptr && byte >= range && byte < range + DEVICE_RANGE * MAX_DEVICES;
}

bool is_pinned(const void *address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto key = reinterpret_cast<uintptr_t>(address);
    auto next = pinned.upper_bound(key);
    if (next == pinned.begin()) return false;
    --next;
    return key < next->first + next->second;
}

aclError check_device_range(const void *address, size_t bytes, int32_t device, const char *what) {
    if (bytes == 0) return ACL_SUCCESS;
    if (!is_device(address)) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s %p is host memory", what, address);
    if (device >= 0 && device_of(address) != device)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "%s %p is memory of device %d, used on device %d", what, address,
                    device_of(address), device);
    std::lock_guard<std::mutex> guard(mutex);
    auto key = reinterpret_cast<uintptr_t>(address);
    auto next = allocations.upper_bound(key);
    if (next == allocations.begin()) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s %p was never allocated", what, address);
    --next;
    size_t offset = key - next->first;
    if (offset >= next->second.bytes)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "%s %p was never allocated", what, address);
    if (!next->second.live) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s %p lies in freed device memory", what, address);
    if (offset + bytes > next->second.bytes)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes at offset %zu end past an allocation of %zu bytes", what, bytes,
                    offset, next->second.bytes);
    return ACL_SUCCESS;
}

}  // namespace host

using namespace host;

extern "C" {

aclError aclrtMalloc(void **address, size_t bytes, aclrtMemMallocPolicy) { return allocate(address, bytes); }
aclError aclrtMallocAlign32(void **address, size_t bytes, aclrtMemMallocPolicy) { return allocate(address, bytes); }

aclError aclrtFree(void *address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = allocations.find(reinterpret_cast<uintptr_t>(address));
    if (found == allocations.end())
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of %p, which aclrtMalloc did not return", address);
    if (!found->second.live) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of %p for the second time", address);
    found->second.live = false;
    int32_t device = device_of(address);
    used[device] -= found->second.bytes;
    size_t pages = round_up(found->second.bytes ? found->second.bytes : 1, 4096);
    madvise(address, pages, MADV_DONTNEED);
    mprotect(address, pages, PROT_NONE);
    log({RELEASE, EXECUTED, device, -1, {reinterpret_cast<int64_t>(address), static_cast<int64_t>(found->second.bytes)}});
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **address, size_t bytes) {
    size_t pages = round_up(bytes ? bytes : 1, 4096);
    if (posix_memalign(address, 4096, pages)) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no host memory left");
    std::lock_guard<std::mutex> guard(mutex);
    pinned[reinterpret_cast<uintptr_t>(*address)] = pages;
    return ACL_SUCCESS;
}
aclError aclrtMallocHostWithCfg(void **address, uint64_t bytes, aclrtMallocConfig *) {
    return aclrtMallocHost(address, bytes);
}
aclError aclrtFreeHost(void *address) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!pinned.erase(reinterpret_cast<uintptr_t>(address)))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost of %p, which aclrtMallocHost did not return", address);
    free(address);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *available, size_t *total) {
    *total = static_cast<size_t>(atoll(getenv("HOST_CANN_MEMORY_BYTES")));
    *available = *total - used[current_device() < 0 ? 0 : current_device()];
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = is_device(address)   ? ACL_MEM_LOCATION_TYPE_DEVICE
                                : is_pinned(address) ? ACL_MEM_LOCATION_TYPE_HOST
                                                     : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    if (is_device(address)) attributes->location.id = static_cast<uint32_t>(device_of(address));
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind) {
    if (capturing()) return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a synchronous copy while a graph is captured");
    log(copy_entry(to, from, bytes, kind, false, -1));
    return copy(to, room, from, bytes, kind);
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream handle) {
    Stream *stream = stream_of(handle, "aclrtMemcpyAsync");
    if (stream == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
    Entry entry = copy_entry(to, from, bytes, kind, true, stream->id);
    if (stream->capture != nullptr && entry.value[5] == 0)
        return fail(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC,
                    "a copy %s with pageable host memory while a graph is captured; pin the memory", name_of(kind));
    return submit(stream, entry, [=] { return copy(to, room, from, bytes, kind); });
}

static aclError fill(void *address, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "memset of %zu bytes into room for %zu", bytes, room);
    if (aclError code = check_device_range(address, bytes, -1, "memset destination")) return code;
    memset(address, value, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void *address, size_t room, int32_t value, size_t bytes) {
    if (capturing()) return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a synchronous memset while a graph is captured");
    log({FILL, EXECUTED, current_device(), -1, {value, static_cast<int64_t>(bytes), reinterpret_cast<int64_t>(address)}});
    return fill(address, room, value, bytes);
}

aclError aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t bytes, aclrtStream handle) {
    Stream *stream = stream_of(handle, "aclrtMemsetAsync");
    if (stream == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
    Entry entry = {FILL, EXECUTED, stream->device, stream->id,
                   {value, static_cast<int64_t>(bytes), reinterpret_cast<int64_t>(address)}};
    return submit(stream, entry, [=] { return fill(address, room, value, bytes); });
}

int host_cann_check_device_range(const void *address, size_t bytes, int32_t device, const char *what) {
    return check_device_range(address, bytes, device, what);
}

}  // extern "C"
