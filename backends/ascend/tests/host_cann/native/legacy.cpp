// The older operator interface (aclop), which torch_npu takes on some chips when an aclnn name is missing: descriptors
// are accepted, and launching is an error that names the operator.
#include <cstdlib>

#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "host.h"

using namespace host;

namespace {
struct Dummy {
    int64_t ignored[4];
};
template <typename T>
T *dummy() {
    return reinterpret_cast<T *>(new Dummy{});
}
aclError refuse_operator(const char *name) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "operator %s (aclop interface) has no host kernel", name);
}
}  // namespace

extern "C" {

aclopAttr *aclopCreateAttr(void) { return dummy<aclopAttr>(); }
void aclopDestroyAttr(const aclopAttr *attribute) { delete reinterpret_cast<const Dummy *>(attribute); }
aclError aclopSetAttrBool(aclopAttr *, const char *, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr *, const char *, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr *, const char *, float) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr *, const char *, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr *, const char *, const char *) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr *, const char *, int, const uint8_t *) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr *, const char *, int, const float *) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr *, const char *, int, const int64_t *) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr *, const char *, int, const int *, const int64_t *const[]) { return ACL_SUCCESS; }

aclDataBuffer *aclCreateDataBuffer(void *, size_t) { return dummy<aclDataBuffer>(); }
aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    delete reinterpret_cast<const Dummy *>(buffer);
    return ACL_SUCCESS;
}
aclTensorDesc *aclCreateTensorDesc(aclDataType, int, const int64_t *, aclFormat) { return dummy<aclTensorDesc>(); }
void aclDestroyTensorDesc(const aclTensorDesc *descriptor) { delete reinterpret_cast<const Dummy *>(descriptor); }
aclError aclSetTensorFormat(aclTensorDesc *, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc *, int, const int64_t *) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc *, aclMemType) { return ACL_SUCCESS; }
void aclSetTensorDescName(aclTensorDesc *, const char *) {}

aclError aclopCompileAndExecute(const char *type, int, const aclTensorDesc *const[], const aclDataBuffer *const[], int,
                                const aclTensorDesc *const[], aclDataBuffer *const[], const aclopAttr *, aclopEngineType,
                                aclopCompileType, const char *, aclrtStream) {
    return refuse_operator(type);
}
aclError aclopCompileAndExecuteV2(const char *type, int, aclTensorDesc *[], aclDataBuffer *[], int, aclTensorDesc *[],
                                  aclDataBuffer *[], aclopAttr *, aclopEngineType, aclopCompileType, const char *,
                                  aclrtStream) {
    return refuse_operator(type);
}

}  // extern "C"
