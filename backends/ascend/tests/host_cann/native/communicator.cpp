#include "communicator.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace host {
namespace {

std::mutex mutex;
std::map<void *, Communicator *> communicators;

double seconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + time.tv_nsec / 1e9;
}

double deadline_s() { return atof(getenv("HOST_CANN_HCCL_DEADLINE_S")); }

// A process that ended but was not waited for still has a pid: read its state.
bool is_alive(int32_t pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY);
    if (file < 0) return false;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return false;
    text[length] = 0;
    const char *close_bracket = strrchr(text, ')');
    return close_bracket != nullptr && close_bracket[2] != 'Z' && close_bracket[2] != 'X';
}

}  // namespace

HcclResult refuse(HcclResult code, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fail(code, "%s", text);
    fprintf(stderr, "host CANN: %s\n", text);
    return code;
}

HcclResult wait_until(Communicator *communicator, const char *what, const std::function<bool()> &ready) {
    double start = seconds(), looked = start;
    for (uint64_t turn = 0; !ready(); turn++) {
        if (communicator->header->broken)
            return refuse(HCCL_E_REMOTE, "%s on rank %u: the communicator broke", what, communicator->rank);
        if (turn < 64) {
            sched_yield();
            continue;
        }
        usleep(100);
        double time = seconds();
        if (time - looked > 0.05) {
            looked = time;
            for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
                int32_t pid = communicator->header->pids[rank];
                if (pid == 0 || is_alive(pid) || ready()) continue;
                communicator->header->broken = 1;
                return refuse(HCCL_E_REMOTE, "%s on rank %u: rank %u (process %d) died", what, communicator->rank, rank, pid);
            }
        }
        if (time - start > deadline_s()) {
            communicator->header->broken = 1;
            return refuse(HCCL_E_TIMEOUT, "%s on rank %u: not all ranks came within %.1f s", what, communicator->rank,
                          deadline_s());
        }
    }
    return HCCL_SUCCESS;
}

HcclResult barrier(Communicator *communicator, const char *what) {
    Header *header = communicator->header;
    uint32_t generation = header->generation;
    if (header->arrived.fetch_add(1) + 1 == communicator->ranks) {
        header->arrived = 0;
        header->generation++;
        return HCCL_SUCCESS;
    }
    return wait_until(communicator, what, [=] { return header->generation != generation; });
}

HcclResult attach(uint32_t ranks, const char *name, uint32_t rank, HcclComm *handle) {
    if (ranks > MAX_RANKS || rank >= ranks)
        return refuse(HCCL_E_PARA, "communicator of %u ranks, rank %u: at most %u ranks", ranks, rank, MAX_RANKS);
    std::string path = std::string("/") + name;
    int file = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
    size_t header_bytes = (sizeof(Header) + 4095) / 4096 * 4096;
    size_t bytes = header_bytes + (ranks + static_cast<size_t>(ranks) * ranks) * SLOT_BYTES;
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return refuse(HCCL_E_MEMORY, "no shared memory %s", name);
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return refuse(HCCL_E_MEMORY, "cannot map %zu bytes of shared memory", bytes);
    auto *header = static_cast<Header *>(memory);
    auto *communicator = new Communicator{ranks, rank, name, header, static_cast<char *>(memory) + header_bytes};
    header->pids[rank] = getpid();
    HcclResult code = barrier(communicator, "HcclCommInit");
    shm_unlink(path.c_str());  // everybody has it mapped, or nobody will
    if (code != HCCL_SUCCESS) return code;
    std::lock_guard<std::mutex> guard(mutex);
    communicators[communicator] = communicator;
    *handle = communicator;
    return HCCL_SUCCESS;
}

HcclResult detach(HcclComm handle) {
    std::lock_guard<std::mutex> guard(mutex);
    return communicators.erase(handle) ? HCCL_SUCCESS : refuse(HCCL_E_PARA, "HcclCommDestroy of %p, which is not live", handle);
}

Communicator *communicator_of(HcclComm handle, const char *caller) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = communicators.find(handle);
    if (found != communicators.end()) return found->second;
    refuse(HCCL_E_PARA, "%s: %p is not a live communicator", caller, handle);
    return nullptr;
}

Communicator *communicator_named(const char *name) {
    std::lock_guard<std::mutex> guard(mutex);
    for (auto &pair : communicators)
        if (pair.second->name == name) return pair.second;
    refuse(HCCL_E_PARA, "no communicator is named %s", name);
    return nullptr;
}

}  // namespace host
