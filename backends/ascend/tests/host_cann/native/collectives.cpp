// HCCL. Every collective first says what it is about to do and compares with what the others say; sums run in rank order.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <sys/mman.h>
#include <unistd.h>

#include "communicator.h"

using namespace host;

namespace {

enum Operation : int32_t {
    ALL_REDUCE = 1, BROADCAST, REDUCE_SCATTER, SCATTER, ALL_GATHER, ALL_TO_ALL, REDUCE, SEND, RECEIVE, BARRIER,
    ALL_GATHER_V, REDUCE_SCATTER_V, ALL_TO_ALL_V, HOST_GATHER,
};

size_t bytes_of(HcclDataType dtype) {
    switch (dtype) {
        case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: case HCCL_DATA_TYPE_HIF8: case HCCL_DATA_TYPE_FP8E4M3:
        case HCCL_DATA_TYPE_FP8E5M2: case HCCL_DATA_TYPE_FP8E8M0: return 1;
        case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: return 2;
        case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
        case HCCL_DATA_TYPE_INT128: return 16;
        default: return 4;
    }
}

float bf16_to_float(uint16_t value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
T reduced(T left, T right, HcclReduceOp reduction) {
    switch (reduction) {
        case HCCL_REDUCE_SUM: return static_cast<T>(left + right);
        case HCCL_REDUCE_PROD: return static_cast<T>(left * right);
        case HCCL_REDUCE_MAX: return right > left ? right : left;
        default: return right < left ? right : left;
    }
}

template <typename Stored, typename Wide, typename Load, typename Save>
void reduce_as(Communicator *c, void *into, uint64_t start, uint64_t count, HcclReduceOp reduction, Load load, Save save) {
    for (uint64_t i = 0; i < count; i++) {
        Wide total = load(reinterpret_cast<Stored *>(c->slot(0))[start + i]);
        for (uint32_t rank = 1; rank < c->ranks; rank++)
            total = reduced<Wide>(total, load(reinterpret_cast<Stored *>(c->slot(rank))[start + i]), reduction);
        static_cast<Stored *>(into)[i] = save(total);
    }
}
template <typename T>
void reduce_plain(Communicator *c, void *into, uint64_t start, uint64_t count, HcclReduceOp reduction) {
    auto same = [](T value) { return value; };
    reduce_as<T, T>(c, into, start, count, reduction, same, same);
}

// The types that the header documents for reductions.
HcclResult reduce(Communicator *c, void *into, uint64_t start, uint64_t count, HcclDataType dtype, HcclReduceOp op) {
    switch (dtype) {
        case HCCL_DATA_TYPE_FP32: reduce_plain<float>(c, into, start, count, op); return HCCL_SUCCESS;
        case HCCL_DATA_TYPE_INT8: reduce_plain<int8_t>(c, into, start, count, op); return HCCL_SUCCESS;
        case HCCL_DATA_TYPE_INT16: reduce_plain<int16_t>(c, into, start, count, op); return HCCL_SUCCESS;
        case HCCL_DATA_TYPE_INT32: reduce_plain<int32_t>(c, into, start, count, op); return HCCL_SUCCESS;
        case HCCL_DATA_TYPE_INT64: reduce_plain<int64_t>(c, into, start, count, op); return HCCL_SUCCESS;
        case HCCL_DATA_TYPE_FP16:
            reduce_as<_Float16, float>(c, into, start, count, op, [](_Float16 v) { return static_cast<float>(v); },
                                       [](float v) { return static_cast<_Float16>(v); });
            return HCCL_SUCCESS;
        case HCCL_DATA_TYPE_BFP16:
            reduce_as<uint16_t, float>(c, into, start, count, op, bf16_to_float, float_to_bf16);
            return HCCL_SUCCESS;
        default: return refuse(HCCL_E_NOT_SUPPORT, "no reduction of data type %d", dtype);
    }
}

// ---- one collective: a name for messages, the buffers, what this rank says
struct Call {
    const char *name;
    Communicator *communicator;
    Stream *stream;
    Post post;
    size_t element;
    const void *send;
    uint64_t send_elements;
    void *receive;
    uint64_t receive_elements;
};

HcclResult compare(const Call &call) {
    Communicator *c = call.communicator;
    const Post &mine = call.post;
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        const Post &other = c->header->posts[rank];
        if (other.operation != mine.operation || other.dtype != mine.dtype || other.count != mine.count ||
            other.reduction != mine.reduction || other.root != mine.root)
            return refuse(HCCL_E_PARA,
                          "%s: ranks disagree: rank %u has operation %d, count %llu, data type %d, reduction %d, root %u; rank "
                          "%u has operation %d, count %llu, data type %d, reduction %d, root %u",
                          call.name, c->rank, mine.operation, static_cast<unsigned long long>(mine.count), mine.dtype,
                          mine.reduction, mine.root, rank, other.operation, static_cast<unsigned long long>(other.count),
                          other.dtype, other.reduction, other.root);
        if (mine.operation >= ALL_GATHER_V && mine.operation <= ALL_TO_ALL_V &&
            other.send_counts[c->rank] != mine.receive_counts[rank])
            return refuse(HCCL_E_PARA, "%s: rank %u sends %llu elements to rank %u, which expects %llu", call.name, rank,
                          static_cast<unsigned long long>(other.send_counts[c->rank]), c->rank,
                          static_cast<unsigned long long>(mine.receive_counts[rank]));
    }
    return HCCL_SUCCESS;
}

HcclResult check_buffers(const Call &call) {
    if (call.send_elements * call.element > SLOT_BYTES)
        return refuse(HCCL_E_PARA, "%s of %llu elements does not fit the emulated slot", call.name,
                      static_cast<unsigned long long>(call.send_elements));
    std::string send = std::string(call.name) + " send buffer", receive = std::string(call.name) + " receive buffer";
    aclError code = check_device_range(call.send, call.send_elements * call.element, call.stream->device, send.c_str());
    if (code == 0)
        code = check_device_range(call.receive, call.receive_elements * call.element, call.stream->device, receive.c_str());
    if (code == 0) return HCCL_SUCCESS;
    fprintf(stderr, "%s: refused buffer (see the error)\n", call.name);
    return HCCL_E_PARA;
}

HcclResult exchange(const Call &call, const std::function<HcclResult(Communicator *)> &collect) {
    Communicator *c = call.communicator;
    if (HcclResult code = check_buffers(call)) {
        c->header->broken = 1;
        return code;
    }
    c->header->posts[c->rank] = call.post;
    if (call.send_elements) memcpy(c->slot(c->rank), call.send, call.send_elements * call.element);
    if (HcclResult code = barrier(c, call.name)) return code;
    HcclResult disagreement = compare(call);
    if (disagreement == HCCL_SUCCESS) disagreement = collect(c);
    // The others must not overwrite what is still being read; nor wait for a rank that gave up.
    if (HcclResult code = barrier(c, call.name)) return disagreement ? disagreement : code;
    return disagreement;
}

HcclResult start(Call call, HcclComm handle, aclrtStream stream, std::function<HcclResult(Communicator *)> collect) {
    call.communicator = communicator_of(handle, call.name);
    call.stream = stream_of(stream, call.name);
    if (call.communicator == nullptr || call.stream == nullptr) return HCCL_E_PARA;
    Entry entry = {COLLECTIVE, EXECUTED, call.stream->device, call.stream->id,
                   {call.post.operation, static_cast<int64_t>(call.post.count), call.post.dtype, call.post.reduction,
                    call.post.root, call.communicator->ranks}};
    return static_cast<HcclResult>(
        submit(call.stream, entry, [=] { return static_cast<aclError>(exchange(call, collect)); }));
}

Post post_of(Operation operation, uint64_t count, HcclDataType dtype, int32_t reduction = -1, uint32_t root = 0) {
    Post post{};
    post.operation = operation;
    post.count = count;
    post.dtype = dtype;
    post.reduction = reduction;
    post.root = root;
    return post;
}

uint64_t extent(const uint64_t *counts, const uint64_t *offsets, uint32_t ranks) {
    uint64_t end = 0;
    for (uint32_t rank = 0; rank < ranks; rank++)
        if (counts[rank] && offsets[rank] + counts[rank] > end) end = offsets[rank] + counts[rank];
    return end;
}

std::string fresh_name() {
    static int serial = 0;
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return "host_cann_" + std::to_string(getpid()) + "_" + std::to_string(time.tv_nsec) + "_" + std::to_string(serial++);
}

thread_local int group_depth = 0;

HcclResult move_point_to_point(Communicator *c, bool send, void *buffer, uint64_t count, HcclDataType dtype, uint32_t peer) {
    if (peer >= c->ranks) return refuse(HCCL_E_PARA, "peer %u of %u ranks", peer, c->ranks);
    size_t bytes = count * bytes_of(dtype);
    if (bytes > SLOT_BYTES) return refuse(HCCL_E_PARA, "a message of %zu bytes does not fit the emulated slot", bytes);
    Channel &channel = send ? c->header->channels[c->rank][peer] : c->header->channels[peer][c->rank];
    uint32_t wanted = send ? 0 : 1;
    if (HcclResult code = wait_until(c, send ? "HcclSend" : "HcclRecv", [&] { return channel.full == wanted; })) return code;
    if (send) {
        channel.dtype = dtype;
        channel.count = count;
        memcpy(c->channel_slot(c->rank, peer), buffer, bytes);
        channel.full = 1;
        return HCCL_SUCCESS;
    }
    if (channel.dtype != dtype || channel.count != count) {
        c->header->broken = 1;
        return refuse(HCCL_E_PARA, "HcclRecv of %llu elements of data type %d; rank %u sent %llu of data type %d",
                      static_cast<unsigned long long>(count), dtype, peer, static_cast<unsigned long long>(channel.count),
                      channel.dtype);
    }
    memcpy(buffer, c->channel_slot(peer, c->rank), bytes);
    channel.full = 0;
    return HCCL_SUCCESS;
}

HcclResult point_to_point(bool send, void *buffer, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm handle,
                          aclrtStream stream_handle) {
    const char *name = send ? "HcclSend" : "HcclRecv";
    Communicator *c = communicator_of(handle, name);
    Stream *stream = stream_of(stream_handle, name);
    if (c == nullptr || stream == nullptr) return HCCL_E_PARA;
    Entry entry = {COLLECTIVE, EXECUTED, stream->device, stream->id,
                   {send ? SEND : RECEIVE, static_cast<int64_t>(count), dtype, -1, peer, c->ranks}};
    auto work = [=]() -> aclError {
        std::string what = std::string(name) + " buffer";
        if (check_device_range(buffer, count * bytes_of(dtype), stream->device, what.c_str())) {
            c->header->broken = 1;
            return HCCL_E_PARA;
        }
        return move_point_to_point(c, send, buffer, count, dtype, peer);
    };
    return static_cast<HcclResult>(submit(stream, entry, work));
}

}  // namespace

extern "C" {

// ---- communicators
HcclResult HcclGetRootInfo(HcclRootInfo *root) {
    memset(root, 0, sizeof *root);
    strncpy(root->internal, fresh_name().c_str(), 100);
    return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root, uint32_t rank, HcclComm *handle) {
    return attach(ranks, root->internal, rank, handle);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root, uint32_t rank, const HcclCommConfig *,
                                      HcclComm *handle) {
    return attach(ranks, root->internal, rank, handle);
}
HcclResult HcclCreateSubCommConfig(HcclComm *handle, uint32_t ranks, uint32_t *, uint64_t id, uint32_t rank, HcclCommConfig *,
                                   HcclComm *result) {
    Communicator *parent = communicator_of(*handle, "HcclCreateSubCommConfig");
    if (parent == nullptr) return HCCL_E_PARA;
    return attach(ranks, (parent->name + "_" + std::to_string(id)).c_str(), rank, result);
}
HcclResult HcclGetCommName(HcclComm handle, char *name) {
    Communicator *c = communicator_of(handle, "HcclGetCommName");
    if (c == nullptr) return HCCL_E_PARA;
    strcpy(name, c->name.c_str());
    return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t *ranks) {
    Communicator *c = communicator_of(handle, "HcclGetRankSize");
    if (c == nullptr) return HCCL_E_PARA;
    *ranks = c->ranks;
    return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank) {
    Communicator *c = communicator_of(handle, "HcclGetRankId");
    if (c == nullptr) return HCCL_E_PARA;
    *rank = c->rank;
    return HCCL_SUCCESS;
}
HcclResult HcclCommDestroy(HcclComm handle) { return detach(handle); }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult *error) {
    Communicator *c = communicator_of(handle, "HcclGetCommAsyncError");
    if (c == nullptr) return HCCL_E_PARA;
    // The call that failed says so itself; here the answer would make torch_npu's watch-dog thread end the process.
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}
const char *HcclGetErrorString(HcclResult) { return aclGetRecentErrMsg(); }
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_COMM_NAME + 1; }
// Sends are buffered, so that the order inside a group cannot dead-lock.
HcclResult HcclGroupStart() {
    group_depth++;
    return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
    if (group_depth == 0) return refuse(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
    group_depth--;
    return HCCL_SUCCESS;
}

// ---- collectives
HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
    Call call = {"HcclBarrier", nullptr, nullptr, post_of(BARRIER, 0, HCCL_DATA_TYPE_INT8), 1, nullptr, 0, nullptr, 0};
    return start(call, handle, stream, [](Communicator *) { return HCCL_SUCCESS; });
}
HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm handle,
                         aclrtStream stream) {
    Call call = {"HcclAllReduce", nullptr, nullptr, post_of(ALL_REDUCE, count, dtype, op), bytes_of(dtype), send, count,
                 receive, count};
    return start(call, handle, stream, [=](Communicator *c) { return reduce(c, receive, 0, count, dtype, op); });
}
HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclReduce");
    if (c0 == nullptr) return HCCL_E_PARA;
    Call call = {"HcclReduce", nullptr, nullptr, post_of(REDUCE, count, dtype, op, root), bytes_of(dtype), send, count,
                 receive, c0->rank == root ? count : 0};
    return start(call, handle, stream, [=](Communicator *c) {
        return c->rank == root ? reduce(c, receive, 0, count, dtype, op) : HCCL_SUCCESS;
    });
}
HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm handle,
                             aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclReduceScatter");
    if (c0 == nullptr) return HCCL_E_PARA;
    Call call = {"HcclReduceScatter", nullptr, nullptr, post_of(REDUCE_SCATTER, count, dtype, op), bytes_of(dtype), send,
                 count * c0->ranks, receive, count};
    return start(call, handle, stream,
                 [=](Communicator *c) { return reduce(c, receive, count * c->rank, count, dtype, op); });
}
HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType dtype, HcclComm handle, aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclAllGather");
    if (c0 == nullptr) return HCCL_E_PARA;
    size_t element = bytes_of(dtype);
    Call call = {"HcclAllGather", nullptr, nullptr, post_of(ALL_GATHER, count, dtype), element, send, count, receive,
                 count * c0->ranks};
    return start(call, handle, stream, [=](Communicator *c) {
        for (uint32_t rank = 0; rank < c->ranks; rank++)
            memcpy(static_cast<char *>(receive) + rank * count * element, c->slot(rank), count * element);
        return HCCL_SUCCESS;
    });
}
HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclBroadcast");
    if (c0 == nullptr) return HCCL_E_PARA;
    Call call = {"HcclBroadcast", nullptr, nullptr, post_of(BROADCAST, count, dtype, -1, root), bytes_of(dtype), buffer,
                 c0->rank == root ? count : 0, buffer, count};
    return start(call, handle, stream, [=](Communicator *c) {
        if (root >= c->ranks) return refuse(HCCL_E_PARA, "HcclBroadcast from rank %u of %u", root, c->ranks);
        if (c->rank != root) memcpy(buffer, c->slot(root), count * bytes_of(dtype));
        return HCCL_SUCCESS;
    });
}
HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclScatter");
    if (c0 == nullptr) return HCCL_E_PARA;
    size_t element = bytes_of(dtype);
    Call call = {"HcclScatter", nullptr, nullptr, post_of(SCATTER, count, dtype, -1, root), element, send,
                 c0->rank == root ? count * c0->ranks : 0, receive, count};
    return start(call, handle, stream, [=](Communicator *c) {
        if (root >= c->ranks) return refuse(HCCL_E_PARA, "HcclScatter from rank %u of %u", root, c->ranks);
        memcpy(receive, c->slot(root) + c->rank * count * element, count * element);
        return HCCL_SUCCESS;
    });
}
HcclResult HcclAlltoAll(const void *send, uint64_t send_count, HcclDataType send_type, const void *receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclAlltoAll");
    if (c0 == nullptr) return HCCL_E_PARA;
    if (send_count != receive_count || send_type != receive_type)
        return refuse(HCCL_E_PARA, "HcclAlltoAll sends %llu elements of data type %d and receives %llu of data type %d",
                      static_cast<unsigned long long>(send_count), send_type, static_cast<unsigned long long>(receive_count),
                      receive_type);
    size_t block = send_count * bytes_of(send_type);
    auto *into = static_cast<char *>(const_cast<void *>(receive));
    Call call = {"HcclAlltoAll", nullptr, nullptr, post_of(ALL_TO_ALL, send_count, send_type), bytes_of(send_type), send,
                 send_count * c0->ranks, into, receive_count * c0->ranks};
    return start(call, handle, stream, [=](Communicator *c) {
        for (uint32_t rank = 0; rank < c->ranks; rank++) memcpy(into + rank * block, c->slot(rank) + c->rank * block, block);
        return HCCL_SUCCESS;
    });
}
HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_offsets, HcclDataType send_type,
                         const void *receive, const void *receive_counts, const void *receive_offsets,
                         HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclAlltoAllV");
    if (c0 == nullptr) return HCCL_E_PARA;
    if (send_type != receive_type) return refuse(HCCL_E_PARA, "HcclAlltoAllV from data type %d to %d", send_type, receive_type);
    size_t element = bytes_of(send_type), vector = c0->ranks * sizeof(uint64_t);
    Post post = post_of(ALL_TO_ALL_V, 0, send_type);
    std::vector<uint64_t> offsets(c0->ranks);
    memcpy(post.send_counts, send_counts, vector);
    memcpy(post.send_offsets, send_offsets, vector);
    memcpy(post.receive_counts, receive_counts, vector);
    memcpy(offsets.data(), receive_offsets, vector);
    auto *into = static_cast<char *>(const_cast<void *>(receive));
    Call call = {"HcclAlltoAllV", nullptr, nullptr, post, element, send,
                 extent(post.send_counts, post.send_offsets, c0->ranks), into,
                 extent(post.receive_counts, offsets.data(), c0->ranks)};
    return start(call, handle, stream, [=](Communicator *c) {
        for (uint32_t rank = 0; rank < c->ranks; rank++) {
            const Post &other = c->header->posts[rank];
            memcpy(into + offsets[rank] * element, c->slot(rank) + other.send_offsets[c->rank] * element,
                   other.send_counts[c->rank] * element);
        }
        return HCCL_SUCCESS;
    });
}
HcclResult HcclAllGatherV(void *send, uint64_t count, void *receive, const void *receive_counts, const void *receive_offsets,
                          HcclDataType dtype, HcclComm handle, aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclAllGatherV");
    if (c0 == nullptr) return HCCL_E_PARA;
    size_t element = bytes_of(dtype);
    Post post = post_of(ALL_GATHER_V, 0, dtype);
    std::vector<uint64_t> offsets(c0->ranks);
    for (uint32_t rank = 0; rank < c0->ranks; rank++) post.send_counts[rank] = count;
    memcpy(post.receive_counts, receive_counts, c0->ranks * sizeof(uint64_t));
    memcpy(offsets.data(), receive_offsets, c0->ranks * sizeof(uint64_t));
    Call call = {"HcclAllGatherV", nullptr, nullptr, post, element, send, count, receive,
                 extent(post.receive_counts, offsets.data(), c0->ranks)};
    return start(call, handle, stream, [=](Communicator *c) {
        for (uint32_t rank = 0; rank < c->ranks; rank++)
            memcpy(static_cast<char *>(receive) + offsets[rank] * element, c->slot(rank), post.receive_counts[rank] * element);
        return HCCL_SUCCESS;
    });
}
HcclResult HcclReduceScatterV(void *send, const void *send_counts, const void *send_offsets, void *receive, uint64_t count,
                              HcclDataType dtype, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
    Communicator *c0 = communicator_of(handle, "HcclReduceScatterV");
    if (c0 == nullptr) return HCCL_E_PARA;
    Post post = post_of(REDUCE_SCATTER_V, 0, dtype, op);
    memcpy(post.send_counts, send_counts, c0->ranks * sizeof(uint64_t));
    memcpy(post.send_offsets, send_offsets, c0->ranks * sizeof(uint64_t));
    for (uint32_t rank = 0; rank < c0->ranks; rank++) post.receive_counts[rank] = count;
    uint64_t offset = post.send_offsets[c0->rank];
    Call call = {"HcclReduceScatterV", nullptr, nullptr, post, bytes_of(dtype), send,
                 extent(post.send_counts, post.send_offsets, c0->ranks), receive, count};
    return start(call, handle, stream, [=](Communicator *c) { return reduce(c, receive, offset, count, dtype, op); });
}

// ---- point to point
HcclResult HcclSend(void *buffer, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm handle, aclrtStream stream) {
    return point_to_point(true, buffer, count, dtype, peer, handle, stream);
}
HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType dtype, uint32_t peer, HcclComm handle, aclrtStream stream) {
    return point_to_point(false, buffer, count, dtype, peer, handle, stream);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm handle, aclrtStream stream) {
    for (int pass = 0; pass < 2; pass++) {
        auto wanted = pass == 0 ? HCCL_SEND : HCCL_RECV;  // all sends are buffered before anybody waits
        for (uint32_t i = 0; i < count; i++) {
            if (items[i].sendRecvType != wanted) continue;
            HcclResult code = point_to_point(pass == 0, items[i].buf, items[i].count, items[i].dataType, items[i].remoteRank,
                                             handle, stream);
            if (code != HCCL_SUCCESS) return code;
        }
    }
    return HCCL_SUCCESS;
}

// For kernels of operators that talk to other ranks (dispatch, combine): gathers host bytes, equally many of each rank.
int host_cann_gather(const char *name, const void *send, uint64_t bytes, void *receive) {
    Communicator *c = communicator_named(name);
    if (c == nullptr) return HCCL_E_PARA;
    if (bytes > SLOT_BYTES) return refuse(HCCL_E_PARA, "gather of %llu bytes", static_cast<unsigned long long>(bytes));
    Call call = {"gather of an operator", c, nullptr, post_of(HOST_GATHER, bytes, HCCL_DATA_TYPE_INT8), 1, nullptr, 0, nullptr, 0};
    c->header->posts[c->rank] = call.post;
    memcpy(c->slot(c->rank), send, bytes);
    if (HcclResult code = barrier(c, call.name)) return code;
    HcclResult code = compare(call);
    for (uint32_t rank = 0; code == HCCL_SUCCESS && rank < c->ranks; rank++)
        memcpy(static_cast<char *>(receive) + rank * bytes, c->slot(rank), bytes);
    HcclResult second = barrier(c, call.name);
    return code ? code : second;
}
int host_cann_ranks(const char *name, uint32_t *ranks, uint32_t *rank) {
    Communicator *c = communicator_named(name);
    if (c == nullptr) return HCCL_E_PARA;
    *ranks = c->ranks;
    *rank = c->rank;
    return 0;
}

}  // extern "C"
