#include "stream.h"

#include <algorithm>

#include "launch.h"
#include "memory.h"

namespace emulator {

namespace {

std::vector<std::weak_ptr<Stream>> streams;

template <class Each> void each_stream(Each each) {
    // Work may add or remove streams.
    auto known = streams;
    for (auto& weak : known)
        if (auto stream = weak.lock()) each(*stream);
}

void do_next(Stream& stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (operation.work) {
        DeviceIsOpen open;
        operation.work();
    } else {
        wait_for(operation.wait);
    }
    if (stream.done < stream.started) stream.done++;
}

} // namespace

std::shared_ptr<Stream> new_stream() {
    auto gone = [](const std::weak_ptr<Stream>& stream) { return stream.expired(); };
    streams.erase(std::remove_if(streams.begin(), streams.end(), gone), streams.end());
    auto stream = std::make_shared<Stream>();
    streams.push_back(stream);
    return stream;
}

void start(Stream& stream, Operation operation) {
    if (stream.capture) {
        stream.capture->operations.push_back(std::move(operation));
        return;
    }
    stream.queue.push_back(std::move(operation));
    stream.started++;
    go_on_a_little();
}

void wait_for(const Moment& moment) {
    DeviceIsOpen open;
    while (moment.stream && moment.stream->done < moment.position && !moment.stream->queue.empty())
        do_next(*moment.stream);
}

bool has_passed(const Moment& moment) { return !moment.stream || moment.stream->done >= moment.position; }

void wait_for_everything() {
    DeviceIsOpen open;
    each_stream([](Stream& stream) {
        while (!stream.queue.empty()) do_next(stream);
    });
}

void forget_everything() {
    each_stream([](Stream& stream) {
        stream.queue.clear();
        stream.done = stream.started;
    });
}

void go_on_a_little() {
    static const unsigned long seed = option("EMULATOR_ORDER", 0);
    static unsigned long state = seed;
    if (seed == 0 || streams.empty()) return;
    state = state * 6364136223846793005ul + 1442695040888963407ul;
    if (state >> 60 & 1) return;
    auto stream = streams[(state >> 33) % streams.size()].lock();
    if (!stream) return;
    for (unsigned count = state >> 50 & 7; count > 0 && !stream->queue.empty(); count--) do_next(*stream);
}

} // namespace emulator
