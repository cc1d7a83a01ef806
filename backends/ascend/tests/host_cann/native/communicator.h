// A communicator: ranks of one machine that meet in one shared memory object.
#pragma once
#include <atomic>
#include <string>

#include "hccl/hccl.h"
#include "host.h"

namespace host {

constexpr uint32_t MAX_RANKS = 16;
constexpr uint64_t SLOT_BYTES = 256ull << 20;  // address space only; pages come into being when written

// What a rank says it is about to do; all ranks must say the same.
struct Post {
    int32_t operation;
    int32_t dtype;
    int32_t reduction;
    uint32_t root;
    uint64_t count;
    uint64_t send_counts[MAX_RANKS], send_offsets[MAX_RANKS], receive_counts[MAX_RANKS];  // ops with counts per rank
};
struct Channel {
    std::atomic<uint32_t> full;
    int32_t dtype;
    uint64_t count;
};
struct Header {
    std::atomic<uint32_t> arrived, generation, broken;
    int32_t pids[MAX_RANKS];
    Post posts[MAX_RANKS];
    Channel channels[MAX_RANKS][MAX_RANKS];  // [from][to]
};
struct Communicator {
    uint32_t ranks, rank;
    std::string name;
    Header *header;
    char *slots;
    char *slot(uint32_t rank_) const { return slots + rank_ * SLOT_BYTES; }
    char *channel_slot(uint32_t from, uint32_t to) const { return slots + (ranks + from * ranks + to) * SLOT_BYTES; }
};

HcclResult refuse(HcclResult code, const char *format, ...) __attribute__((format(printf, 2, 3)));
HcclResult attach(uint32_t ranks, const char *name, uint32_t rank, HcclComm *handle);
Communicator *communicator_of(HcclComm handle, const char *caller);
Communicator *communicator_named(const char *name);
HcclResult detach(HcclComm handle);
// Waits until `ready`, a rank dies, or the deadline passes.
HcclResult wait_until(Communicator *communicator, const char *what, const std::function<bool()> &ready);
HcclResult barrier(Communicator *communicator, const char *what);

}  // namespace host
