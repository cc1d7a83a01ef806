// Device, context, options and the log. What the environment says: HOST_CANN_SOC, HOST_CANN_DEVICES,
// HOST_CANN_MEMORY_BYTES, HOST_CANN_CUBE_CORES, HOST_CANN_VECTOR_CORES, HOST_CANN_VERSION (loading.py sets them).
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include <unistd.h>

#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "host.h"

namespace host {
namespace {

std::mutex mutex;
std::vector<Entry> entries;
bool keep_log = false;
thread_local std::string reason;
thread_local int32_t device = -1;
std::map<int, std::string> compile_options;
std::map<int, int64_t> system_options;

int64_t number(const char *name) { return atoll(getenv(name)); }

}  // namespace

aclError fail(aclError code, const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    reason = std::string("host CANN: ") + text;
    return code;
}

void log(const Entry &entry) {
    std::lock_guard<std::mutex> guard(mutex);
    if (keep_log) entries.push_back(entry);
}

int32_t current_device() { return device; }

}  // namespace host

using namespace host;

extern "C" {

// ---- for Python
void host_cann_keep_log(int keep) {
    std::lock_guard<std::mutex> guard(mutex);
    keep_log = keep != 0;
    if (!keep_log) entries.clear();
}
int64_t host_cann_log_size(void) {
    std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(entries.size());
}
void host_cann_read_log(int64_t start, int64_t count, Entry *into) {
    std::lock_guard<std::mutex> guard(mutex);
    memcpy(into, entries.data() + start, static_cast<size_t>(count) * sizeof(Entry));
}
void host_cann_set_reason(const char *text) { reason = std::string("host CANN: ") + text; }
// A function of the runtime that has no emulation: an error that names it, and a line in the log.
int host_cann_refuse(const char *name) {
    log({REFUSED, EXECUTED, device, -1, {reinterpret_cast<int64_t>(name)}});
    // The first reason is the one to report: torch_npu asks for details when something failed already.
    if (reason.empty()) fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s is not emulated", name);
    fprintf(stderr, "host CANN: %s is not emulated\n", name);
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

// ---- process, device, context
aclError aclInit(const char *) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
const char *aclGetRecentErrMsg(void) {
    thread_local std::string reported;
    reported.swap(reason);
    reason.clear();
    return reported.c_str();
}
const char *aclrtGetSocName(void) { return getenv("HOST_CANN_SOC"); }
aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = static_cast<uint32_t>(number("HOST_CANN_DEVICES"));
    return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t wanted) {
    if (wanted < 0 || wanted >= number("HOST_CANN_DEVICES"))
        return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice(%d): there are %lld devices", wanted,
                    static_cast<long long>(number("HOST_CANN_DEVICES")));
    device = wanted;
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t *current) {
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *current = device;
    return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = reinterpret_cast<void *>(static_cast<intptr_t>(0x1000 + device));
    return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<intptr_t>(context)) - 0x1000);
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
    if (flags != nullptr) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *logical) {
    *logical = user;
    return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
    *can = 1;
    return ACL_SUCCESS;
}
aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}
aclError aclrtDeviceGetUuid(int32_t which, aclrtUuid *uuid) {
    memset(uuid, which, sizeof *uuid);
    return ACL_SUCCESS;
}

// ---- what the chip is
static aclError core_count(bool cube, int64_t *value) {
    *value = number(cube ? "HOST_CANN_CUBE_CORES" : "HOST_CANN_VECTOR_CORES");
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t *value) {
    switch (attribute) {
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: return core_count(true, value);
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: return core_count(false, value);
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = number("HOST_CANN_MEMORY_BYTES"); return ACL_SUCCESS;
        default: *value = 0; return ACL_SUCCESS;
    }
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t *value) {
    if (info == ACL_DEVICE_INFO_AI_CORE_NUM) return core_count(true, value);
    if (info == ACL_DEVICE_INFO_VECTOR_CORE_NUM) return core_count(false, value);
    *value = 0;
    return ACL_SUCCESS;
}
static aclError core_limit(aclrtDevResLimitType type, uint32_t *value) {
    int64_t wide = 0;
    core_count(type == ACL_RT_DEV_RES_CUBE_CORE, &wide);
    *value = static_cast<uint32_t>(wide);
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t *value) { return core_limit(type, value); }
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t *value) { return core_limit(type, value); }
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) { return core_limit(type, value); }
aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    strncpy(version->version, getenv("HOST_CANN_VERSION"), sizeof version->version - 1);
    return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char *, char *version) {
    strcpy(version, getenv("HOST_CANN_VERSION"));
    return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    *value = attribute == ACL_CANN_ATTR_INF_NAN;
    return ACL_SUCCESS;
}

// ---- options and errors
aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    compile_options[option] = value;
    return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t room) {
    auto found = compile_options.find(option);
    strncpy(value, found == compile_options.end() ? "disable" : found->second.c_str(), room);
    return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    system_options[option] = value;
    return ACL_SUCCESS;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = system_options[option];
    return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
int64_t host_cann_system_option(int option) { return system_options[option]; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
    if (actual != nullptr) *actual = timeout;
    return ACL_SUCCESS;
}
aclError aclrtGetErrorVerbose(int32_t, aclrtErrorInfo *info) {
    memset(info, 0, sizeof *info);
    return ACL_SUCCESS;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
void aclAppLog(aclLogLevel, const char *, const char *, uint32_t, const char *, ...) {}

// ---- profiling and dump hooks that torch_npu calls always; nothing to do
aclError aclmdlInitDump(void) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump(void) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }

}  // extern "C"
