
// Sums by way of subgroups, which have at least SUBGROUP threads, and of shared memory beyond.

var<workgroup> sums: array<f32, 256>;

// The sum over each 32 consecutive threads. All threads of the workgroup call it.
fn sum_32(thread: u32, value: f32) -> f32 { return sum_threads(thread, value, 32u); }

// The sum over `count` consecutive threads, a power of two.
fn sum_threads(thread: u32, value: f32, count: u32) -> f32 {
    var sum = value;
    var step = 1u;
    for (; step < min(count, SUBGROUP); step *= 2u) { sum += subgroupShuffleXor(sum, step); }
    for (; step < count; step *= 2u) {
        sums[thread] = sum;
        workgroupBarrier();
        sum += sums[thread ^ step];
        workgroupBarrier();
    }
    return sum;
}

// The largest of the values of `count` consecutive threads, a power of two.
fn max_threads(thread: u32, value: f32, count: u32) -> f32 {
    var largest = value;
    var step = 1u;
    for (; step < min(count, SUBGROUP); step *= 2u) { largest = max(largest, subgroupShuffleXor(largest, step)); }
    for (; step < count; step *= 2u) {
        sums[thread] = largest;
        workgroupBarrier();
        largest = max(largest, sums[thread ^ step]);
        workgroupBarrier();
    }
    return largest;
}
