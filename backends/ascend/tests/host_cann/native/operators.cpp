// Operators (libopapi): descriptors as torch_npu makes them, and one entry for every two-phase aclnn call. The generated
// trampolines jump to host_cann_phase1/2 with a number in eax; Python knows the prototypes and has the kernels.
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "host.h"

extern "C" {
extern const char *const host_cann_operator_names[];
extern const int host_cann_operator_count;
}

namespace {

constexpr int MAX_DIMENSIONS = 16;
constexpr aclError REFUSED_CALL = 561103;  // what aclnn returns for an inner error

struct Tensor {
    int64_t dimensions, shape[MAX_DIMENSIONS], strides[MAX_DIMENSIONS], offset;
    int64_t dtype, format;
    void *address;
    int64_t storage_dimensions, storage_shape[MAX_DIMENSIONS];
};
struct Scalar {
    int64_t dtype;
    unsigned char bytes[16];
};
struct Array {
    int64_t count;
    int64_t *integers;
    double *floats;
    void **handles;
};
enum DescriptorKind { TENSOR = 1, TENSOR_LIST = 2, INTEGERS = 3, BOOLEANS = 4, FLOATS = 5, SCALAR = 6, SCALAR_LIST = 7 };

std::mutex mutex;
std::unordered_map<const void *, int> descriptors;

template <typename T>
T *keep(T *descriptor, DescriptorKind kind) {
    std::lock_guard<std::mutex> guard(mutex);
    descriptors[descriptor] = kind;
    return descriptor;
}

bool drop(const void *descriptor) {
    std::lock_guard<std::mutex> guard(mutex);
    return descriptors.erase(descriptor) > 0;
}

template <typename T>
Array *integer_array(const T *values, uint64_t count, DescriptorKind kind) {
    auto *array = new Array{static_cast<int64_t>(count), new int64_t[count + 1], nullptr, nullptr};
    for (uint64_t i = 0; i < count; i++) array->integers[i] = static_cast<int64_t>(values[i]);
    return keep(array, kind);
}

template <typename T>
Array *handle_array(const T *const *values, uint64_t count, DescriptorKind kind) {
    auto *array = new Array{static_cast<int64_t>(count), nullptr, nullptr, new void *[count + 1]};
    for (uint64_t i = 0; i < count; i++) array->handles[i] = const_cast<T *>(values[i]);
    return keep(array, kind);
}

int drop_array(const void *descriptor) {
    if (descriptor == nullptr) return 0;
    if (!drop(descriptor)) return host::fail(REFUSED_CALL, "destroy of a descriptor %p that is not live", descriptor);
    auto *array = static_cast<const Array *>(descriptor);
    delete[] array->integers;
    delete[] array->floats;
    delete[] array->handles;
    delete array;
    return 0;
}

size_t scalar_bytes(aclDataType dtype) {
    switch (dtype) {
        case ACL_BOOL: case ACL_INT8: case ACL_UINT8: return 1;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64: return 8;
        case ACL_COMPLEX128: return 16;
        default: return 4;
    }
}

// phase 1: registers and stack of the call; returns an aclnn status
using Prepare = int (*)(const char *name, uint64_t *integers, uint64_t *floats, uint64_t *stack);
// runs a prepared call; again: a replay may ask for it once more
using Execute = int (*)(int64_t call, int32_t device, int32_t again);
Prepare prepare = nullptr;
Execute execute = nullptr;
// A call whose executor Python could not hand back through the arguments (an operator without a prototype).
thread_local int64_t pending = 0;

}  // namespace

using namespace host;

extern "C" {

void host_cann_set_callbacks(Prepare first, Execute second) {
    prepare = first;
    execute = second;
}
void host_cann_set_pending(int64_t call) { pending = call; }
int host_cann_kind_of(const void *descriptor) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = descriptors.find(descriptor);
    return found == descriptors.end() ? 0 : found->second;
}
int64_t host_cann_live_descriptors(void) {
    std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(descriptors.size());
}

int host_cann_phase1(uint32_t index, uint64_t *integers, uint64_t *floats, uint64_t *stack) {
    const char *name = host_cann_operator_names[index];
    if (prepare == nullptr) return fail(REFUSED_CALL, "%s before host_cann.load() finished", name);
    pending = 0;
    return prepare(name, integers, floats, stack);
}
int host_cann_phase2(uint32_t index, void *, uint64_t, void *executor, aclrtStream handle) {
    const char *name = host_cann_operator_names[index];
    Stream *stream = stream_of(handle, name);
    if (stream == nullptr) return REFUSED_CALL;
    auto call = static_cast<int64_t>(reinterpret_cast<intptr_t>(executor));
    if (call == 0) call = pending;
    pending = 0;
    if (call <= 0) return fail(REFUSED_CALL, "%s: launched without a prepared executor", name);
    Entry entry = {OPERATOR, EXECUTED, stream->device, stream->id, {call, static_cast<int64_t>(index)}};
    int32_t again = stream->capture != nullptr;
    return submit(stream, entry, [call, stream, again] { return execute(call, stream->device, again); });
}

Tensor *aclCreateTensor(const int64_t *shape, uint64_t dimensions, aclDataType dtype, const int64_t *strides, int64_t offset,
                        aclFormat format, const int64_t *storage_shape, uint64_t storage_dimensions, void *address) {
    if (dimensions > MAX_DIMENSIONS || storage_dimensions > MAX_DIMENSIONS) {
        fail(REFUSED_CALL, "aclCreateTensor with more than %d dimensions", MAX_DIMENSIONS);
        return nullptr;
    }
    auto *tensor = new Tensor{};
    tensor->dimensions = static_cast<int64_t>(dimensions);
    for (uint64_t i = 0; i < dimensions; i++) {
        tensor->shape[i] = shape[i];
        tensor->strides[i] = strides ? strides[i] : 0;
    }
    tensor->offset = offset;
    tensor->dtype = dtype;
    tensor->format = format;
    tensor->address = address;
    tensor->storage_dimensions = static_cast<int64_t>(storage_dimensions);
    for (uint64_t i = 0; i < storage_dimensions; i++) tensor->storage_shape[i] = storage_shape[i];
    return keep(tensor, TENSOR);
}
int aclDestroyTensor(const void *tensor) {
    if (tensor == nullptr) return 0;
    if (!drop(tensor)) return fail(REFUSED_CALL, "destroy of a tensor %p that is not live", tensor);
    delete static_cast<const Tensor *>(tensor);
    return 0;
}
Array *aclCreateTensorList(const Tensor *const *values, uint64_t count) { return handle_array(values, count, TENSOR_LIST); }
int aclDestroyTensorList(const void *list) {
    if (list == nullptr) return 0;
    // As documented for aclnn: a list owns its tensors.
    auto *array = static_cast<const Array *>(list);
    for (int64_t i = 0; i < array->count; i++) aclDestroyTensor(array->handles[i]);
    return drop_array(list);
}
Array *aclCreateIntArray(const int64_t *values, uint64_t count) { return integer_array(values, count, INTEGERS); }
Array *aclCreateBoolArray(const bool *values, uint64_t count) { return integer_array(values, count, BOOLEANS); }
Array *aclCreateFloatArray(const float *values, uint64_t count) {
    auto *array = new Array{static_cast<int64_t>(count), nullptr, new double[count + 1], nullptr};
    for (uint64_t i = 0; i < count; i++) array->floats[i] = values[i];
    return keep(array, FLOATS);
}
int aclDestroyIntArray(const void *array) { return drop_array(array); }
int aclDestroyBoolArray(const void *array) { return drop_array(array); }
int aclDestroyFloatArray(const void *array) { return drop_array(array); }
Scalar *aclCreateScalar(void *value, aclDataType dtype) {
    auto *scalar = new Scalar{dtype, {0}};
    memcpy(scalar->bytes, value, scalar_bytes(dtype));
    return keep(scalar, SCALAR);
}
int aclDestroyScalar(const void *scalar) {
    if (scalar == nullptr) return 0;
    if (!drop(scalar)) return fail(REFUSED_CALL, "destroy of a scalar %p that is not live", scalar);
    delete static_cast<const Scalar *>(scalar);
    return 0;
}
Array *aclCreateScalarList(const Scalar *const *values, uint64_t count) { return handle_array(values, count, SCALAR_LIST); }
int aclDestroyScalarList(const void *list) {
    if (list == nullptr) return 0;
    auto *array = static_cast<const Array *>(list);
    for (int64_t i = 0; i < array->count; i++) aclDestroyScalar(array->handles[i]);
    return drop_array(list);
}
int aclDestroyAclOpExecutor(void *) { return 0; }
int host_cann_set_view_shape(void *handle, const int64_t *shape, uint64_t dimensions) {
    if (host_cann_kind_of(handle) != TENSOR || dimensions > MAX_DIMENSIONS)
        return fail(REFUSED_CALL, "the result's descriptor is gone");
    auto *tensor = static_cast<Tensor *>(handle);
    tensor->dimensions = static_cast<int64_t>(dimensions);
    memcpy(tensor->shape, shape, dimensions * sizeof *shape);
    return 0;
}
// The one operator that says beforehand what shape and format its result has: ND to FRACTAL_NZ, tiles of 16 rows by C0
// columns. C0 counts elements of `additional_dtype` in 32 bytes; the caller releases the shape.
int aclnnNpuFormatCastCalculateSizeAndFormat(const Tensor *source, int format, int additional_dtype, int64_t **shape,
                                             uint64_t *dimensions, int *actual_format) {
    if (host_cann_kind_of(source) != TENSOR) return fail(REFUSED_CALL, "format cast of a descriptor that is not live");
    bool is_fp4 = source->dtype == ACL_FLOAT4_E2M1 && additional_dtype == ACL_FLOAT8_E4M3FN;
    bool is_byte = source->dtype == additional_dtype && (additional_dtype == ACL_INT8 || additional_dtype == ACL_FLOAT8_E4M3FN);
    // torch_npu names the plain order of three and four dimensions NCL and NCHW.
    bool is_plain = source->format == ACL_FORMAT_ND || source->format == ACL_FORMAT_NCL || source->format == ACL_FORMAT_NCHW;
    if (!is_plain || format != ACL_FORMAT_FRACTAL_NZ || !(is_fp4 || is_byte))
        return fail(REFUSED_CALL, "format cast from format %d, type %d to format %d with tiles of type %d is not emulated",
                    static_cast<int>(source->format), static_cast<int>(source->dtype), format, additional_dtype);
    constexpr int64_t ROWS = 16, COLUMNS = 32;
    int64_t batch = source->dimensions - 2;
    if (batch < 0 || source->dimensions + 2 > MAX_DIMENSIONS)
        return fail(REFUSED_CALL, "format cast of %d dimensions", static_cast<int>(source->dimensions));
    *dimensions = static_cast<uint64_t>(source->dimensions + 2);
    *shape = new int64_t[*dimensions];
    memcpy(*shape, source->shape, static_cast<size_t>(batch) * sizeof **shape);
    int64_t *tiles = *shape + batch;
    tiles[0] = (source->shape[batch + 1] + COLUMNS - 1) / COLUMNS;
    tiles[1] = (source->shape[batch] + ROWS - 1) / ROWS;
    tiles[2] = ROWS;
    tiles[3] = COLUMNS;
    *actual_format = is_fp4 ? ACL_FORMAT_FRACTAL_NZ_C0_32 : ACL_FORMAT_FRACTAL_NZ;
    return 0;
}
int aclGetViewShape(const Tensor *tensor, int64_t **shape, uint64_t *dimensions) {
    *dimensions = static_cast<uint64_t>(tensor->dimensions);
    *shape = new int64_t[MAX_DIMENSIONS];
    memcpy(*shape, tensor->shape, sizeof tensor->shape);
    return 0;
}

}  // extern "C"
