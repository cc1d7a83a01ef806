// Streams, events and graphs. Work runs when it is submitted, so order between streams is logged, not exercised;
// work on a stream under capture does not run, as on the chip: replay runs it.
#include <time.h>

#include <map>
#include <memory>

#include "host.h"

namespace host {
namespace {

struct Event {
    int32_t id;
    bool recorded;
    double milliseconds;
    Model *capture;     // the capture in which it was last recorded
    Stream *stream;
};

std::mutex mutex;
std::set<Stream *> streams;
std::set<Event *> events;
std::set<Model *> models;
std::map<int32_t, Stream *> defaults;
int32_t next_stream = 0, next_event = 0;
uint32_t next_model = 1;
int captures = 0;

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

Stream *create() {
    auto *stream = new Stream{next_stream++, current_device(), nullptr, false};
    streams.insert(stream);
    return stream;
}

Event *event_of(aclrtEvent handle, const char *caller) {
    std::lock_guard<std::mutex> guard(mutex);
    auto *event = static_cast<Event *>(handle);
    if (events.count(event)) return event;
    fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is not a live event", caller, handle);
    return nullptr;
}

Model *model_of(aclmdlRI handle, const char *caller) {
    std::lock_guard<std::mutex> guard(mutex);
    auto *model = static_cast<Model *>(handle);
    if (models.count(model)) return model;
    fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is not a live graph", caller, handle);
    return nullptr;
}

aclError synchronise(const char *caller, Stream *stream, int what) {
    if (stream != nullptr ? stream->capture != nullptr : captures > 0)
        return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s while a graph is captured", caller);
    log({SYNCHRONISE, EXECUTED, current_device(), stream ? stream->id : -1, {what}});
    return ACL_SUCCESS;
}

}  // namespace

bool capturing() { return captures > 0; }

Stream *stream_of(aclrtStream handle, const char *caller) {
    std::lock_guard<std::mutex> guard(mutex);
    if (handle == nullptr) {
        Stream *&found = defaults[current_device()];
        if (found == nullptr) found = create();
        return found;
    }
    auto *stream = static_cast<Stream *>(handle);
    if (streams.count(stream)) return stream;
    fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is not a live stream", caller, handle);
    return nullptr;
}

aclError submit(Stream *stream, Entry entry, std::function<aclError()> work) {
    if (stream->capture == nullptr) {
        entry.phase = EXECUTED;
        log(entry);
        return work();
    }
    entry.phase = CAPTURED;
    log(entry);
    stream->capture->nodes.push_back({entry, std::move(work)});
    if (stream != stream->capture->origin) stream->unjoined = true;
    return ACL_SUCCESS;
}

}  // namespace host

using namespace host;
constexpr aclError INVALID = ACL_ERROR_RT_PARAM_INVALID;

extern "C" {

aclError aclrtCreateStream(aclrtStream *handle) {
    std::lock_guard<std::mutex> guard(mutex);
    *handle = create();
    return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t, uint32_t) { return aclrtCreateStream(handle); }
aclError aclrtDestroyStream(aclrtStream handle) {
    Stream *stream = stream_of(handle, "aclrtDestroyStream");
    if (stream == nullptr) return INVALID;
    if (stream->capture != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtDestroyStream of a stream under capture");
    std::lock_guard<std::mutex> guard(mutex);
    streams.erase(stream);
    delete stream;
    return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }
aclError aclrtSynchronizeStream(aclrtStream handle) {
    Stream *stream = stream_of(handle, "aclrtSynchronizeStream");
    return stream ? synchronise("aclrtSynchronizeStream", stream, 0) : INVALID;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t) { return aclrtSynchronizeStream(handle); }
aclError aclrtSynchronizeDevice(void) { return synchronise("aclrtSynchronizeDevice", nullptr, 1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    if (stream_of(handle, "aclrtStreamQuery") == nullptr) return INVALID;
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    Stream *stream = stream_of(handle, "aclrtStreamGetId");
    if (stream == nullptr) return INVALID;
    *id = stream->id;
    return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream handle, aclrtStreamAttr, aclrtStreamAttrValue *) {
    return stream_of(handle, "aclrtSetStreamAttribute") ? ACL_SUCCESS : INVALID;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t) {
    return stream_of(handle, "aclrtSetStreamOverflowSwitch") ? ACL_SUCCESS : INVALID;
}
aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void *arguments) {
    Stream *stream = stream_of(handle, "aclrtLaunchHostFunc");
    if (stream == nullptr) return INVALID;
    return submit(stream, {SYNCHRONISE, EXECUTED, stream->device, stream->id, {3}}, [=] {
        function(arguments);
        return ACL_SUCCESS;
    });
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t) {
    std::lock_guard<std::mutex> guard(mutex);
    auto *event = new Event{next_event++, false, 0, nullptr, nullptr};
    events.insert(event);
    *handle = event;
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) { return aclrtCreateEventExWithFlag(handle, flag); }
aclError aclrtCreateEvent(aclrtEvent *handle) { return aclrtCreateEventExWithFlag(handle, 0); }
aclError aclrtDestroyEvent(aclrtEvent handle) {
    Event *event = event_of(handle, "aclrtDestroyEvent");
    if (event == nullptr) return INVALID;
    std::lock_guard<std::mutex> guard(mutex);
    events.erase(event);
    delete event;
    return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    Event *event = event_of(handle, "aclrtRecordEvent");
    Stream *stream = stream_of(stream_handle, "aclrtRecordEvent");
    if (event == nullptr || stream == nullptr) return INVALID;
    event->recorded = true;
    event->stream = stream;
    event->capture = stream->capture;
    bool unjoined = stream->unjoined;
    auto work = [=] {
        if (events.count(event)) event->milliseconds = now();
        return ACL_SUCCESS;
    };
    aclError code = submit(stream, {EVENT_RECORD, EXECUTED, stream->device, stream->id, {event->id}}, work);
    stream->unjoined = unjoined;
    return code;
}
aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
    return event_of(handle, "aclrtResetEvent") ? ACL_SUCCESS : INVALID;
}
aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    Event *event = event_of(handle, "aclrtStreamWaitEvent");
    Stream *stream = stream_of(stream_handle, "aclrtStreamWaitEvent");
    if (event == nullptr || stream == nullptr) return INVALID;
    if (!event->recorded) return fail(INVALID, "aclrtStreamWaitEvent: event %d was never recorded", event->id);
    if (event->capture != nullptr && !event->capture->finished) {
        if (stream->capture == nullptr) {
            stream->capture = event->capture;
            event->capture->streams.insert(stream);
        }
        if (stream->capture != event->capture)
            return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a stream of one capture waits for an event of another");
        if (streams.count(event->stream) && stream != event->stream) event->stream->unjoined = false;
    } else if (stream->capture != nullptr && event->capture == nullptr) {
        return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                    "a stream under capture waits for event %d, which was recorded outside of the capture", event->id);
    }
    return submit(stream, {EVENT_WAIT, EXECUTED, stream->device, stream->id, {event->id}}, [] { return ACL_SUCCESS; });
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    Event *event = event_of(handle, "aclrtSynchronizeEvent");
    if (event == nullptr) return INVALID;
    if (event->capture != nullptr && !event->capture->finished)
        return fail(ACL_ERROR_RT_EVENT_CAPTURED, "aclrtSynchronizeEvent of an event under capture");
    log({SYNCHRONISE, EXECUTED, current_device(), -1, {2}});
    return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    Event *event = event_of(handle, "aclrtQueryEventStatus");
    if (event == nullptr) return INVALID;
    if (event->capture != nullptr && !event->capture->finished)
        return fail(ACL_ERROR_RT_EVENT_CAPTURED, "aclrtQueryEventStatus of an event under capture");
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    if (event_of(handle, "aclrtQueryEventWaitStatus") == nullptr) return INVALID;
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    Event *first = event_of(start, "aclrtEventElapsedTime"), *second = event_of(end, "aclrtEventElapsedTime");
    if (first == nullptr || second == nullptr) return INVALID;
    if (!first->recorded || !second->recorded) return fail(INVALID, "aclrtEventElapsedTime of an event not recorded");
    *milliseconds = static_cast<float>(second->milliseconds - first->milliseconds);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    Stream *stream = stream_of(handle, "aclmdlRICaptureBegin");
    if (stream == nullptr) return INVALID;
    if (stream->capture != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is under capture already");
    std::lock_guard<std::mutex> guard(mutex);
    auto *model = new Model{next_model++, stream, {stream}, {}, false};
    models.insert(model);
    stream->capture = model;
    captures++;
    log({CAPTURE_BEGIN, EXECUTED, stream->device, stream->id, {model->id, mode}});
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    Stream *stream = stream_of(handle, "aclmdlRICaptureGetInfo");
    if (stream == nullptr) return INVALID;
    *status = stream->capture ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model != nullptr) *model = stream->capture;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *result) {
    Stream *stream = stream_of(handle, "aclmdlRICaptureEnd");
    if (stream == nullptr) return INVALID;
    Model *model = stream->capture;
    if (model == nullptr) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "aclmdlRICaptureEnd of a stream not under capture");
    if (model->origin != stream)
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "aclmdlRICaptureEnd on a stream that joined the capture");
    int32_t unjoined = -1;
    for (Stream *member : model->streams) {
        if (member->unjoined) unjoined = member->id;
        member->capture = nullptr;
        member->unjoined = false;
    }
    model->finished = true;
    captures--;
    log({CAPTURE_END, EXECUTED, stream->device, stream->id, {model->id, static_cast<int64_t>(model->nodes.size())}});
    if (unjoined >= 0)
        return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "capture ended, but nobody waited for the work of stream %d", unjoined);
    *result = model;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *) { return ACL_SUCCESS; }
aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
    Model *model = model_of(handle, "aclmdlRIExecuteAsync");
    Stream *stream = stream_of(stream_handle, "aclmdlRIExecuteAsync");
    if (model == nullptr || stream == nullptr) return INVALID;
    if (!model->finished) return fail(ACL_ERROR_RT_MODEL_CAPTURED, "replay of a graph under capture");
    log({REPLAY, EXECUTED, stream->device, stream->id, {model->id, static_cast<int64_t>(model->nodes.size())}});
    for (Node &node : model->nodes) {
        node.entry.phase = REPLAYED;
        log(node.entry);
        if (aclError code = node.work()) return code;
    }
    return ACL_SUCCESS;
}
aclError aclmdlRIDestroy(aclmdlRI handle) {
    Model *model = model_of(handle, "aclmdlRIDestroy");
    if (model == nullptr) return INVALID;
    std::lock_guard<std::mutex> guard(mutex);
    models.erase(model);
    for (Event *event : events)
        if (event->capture == model) event->capture = nullptr;
    delete model;
    return ACL_SUCCESS;
}
aclError aclmdlRIGetId(aclmdlRI handle, uint32_t *id) {
    Model *model = model_of(handle, "aclmdlRIGetId");
    if (model == nullptr) return INVALID;
    *id = model->id;
    return ACL_SUCCESS;
}

}  // extern "C"
