// What the parts of the host CANN share: errors with a reason, the log of everything that was asked of the device,
// device memory with bounds, streams that can be captured, communicators that live in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "acl/acl.h"

namespace host {

// Stores the reason that aclGetRecentErrMsg reports, prints nothing, returns `code`.
aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum Kind : int32_t {
    OPERATOR = 1,
    COPY = 2,
    FILL = 3,
    EVENT_RECORD = 4,
    EVENT_WAIT = 5,
    CAPTURE_BEGIN = 6,
    CAPTURE_END = 7,
    REPLAY = 8,
    ALLOCATE = 9,
    RELEASE = 10,
    COLLECTIVE = 11,
    SYNCHRONISE = 12,
    REFUSED = 13,
};
enum Phase : int32_t { EXECUTED = 0, CAPTURED = 1, REPLAYED = 2 };

// One line of the log. `value` means what the kind says; recording.py names the fields.
struct Entry {
    int32_t kind;
    int32_t phase;
    int32_t device;
    int32_t stream;
    int64_t value[6];
};
void log(const Entry &entry);

struct Model;
struct Stream {
    int32_t id;
    int32_t device;
    Model *capture;   // the graph that is being captured through this stream, or null
    bool unjoined;    // captured work of this stream that the capture's origin has not waited for
};
struct Node {
    Entry entry;
    std::function<aclError()> work;
};
struct Model {
    uint32_t id;
    Stream *origin;
    std::set<Stream *> streams;
    std::vector<Node> nodes;
    bool finished;
};

// The stream behind a handle (null: the default stream of the current device); null and a reason if there is none.
Stream *stream_of(aclrtStream handle, const char *caller);
// Does `work` now, or keeps it for replay when the stream is being captured.
aclError submit(Stream *stream, Entry entry, std::function<aclError()> work);
// Whether any stream is being captured (a global capture forbids synchronous work).
bool capturing();

int32_t current_device();
bool is_device(const void *address);
bool is_pinned(const void *address);
// Refuses unless [address, address + bytes) lies in one live allocation of `device` (-1: any device).
aclError check_device_range(const void *address, size_t bytes, int32_t device, const char *what);

}  // namespace host
