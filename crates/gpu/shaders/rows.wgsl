
// Operations on rows of activations.

struct Args {
    count: u32, // numbers, or rows
    width: u32, // of a row of x, or numbers that are normed together
    other: u32, // of a row of y
    first: u32,
    part: u32,
    at: u32,
    kind: u32,
    alpha: f32,
    limit: f32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read_write> x: array<f32>;
@group(0) @binding(#) var<storage, read_write> y: array<f32>;
@group(0) @binding(#) var<storage, read> w: array<f32>;

// The number of a thread that has one of `count` numbers, in a grid of up to 65535 workgroups a row.
fn place(group: vec3<u32>, thread: u32) -> u32 { return 256u * (group.x + 65535u * group.y) + thread; }

// y = norm(x) * w, over each `width` numbers; one workgroup for each.
@compute @workgroup_size(256)
fn rms_norm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.x + 65535u * group.y) * args.width;
    let there = group.x + 65535u * group.y < args.count;
    var squares = 0.0;
    // The order of sums is that of products.wgsl.
    if there {
        for (var i = 4u * thread; i < args.width; i += 1024u) {
            for (var j = i; j < min(i + 4u, args.width); j++) { squares = fma(x[at + j], x[at + j], squares); }
        }
    }
    let scale = 1.0 / sqrt(sum_threads(thread, squares, 256u) / f32(args.width) + args.alpha);
    if there {
        for (var i = thread; i < args.width; i += 256u) { y[at + i] = x[at + i] * scale * w[i]; }
    }
}

// y = (x - mean) / sqrt(variance + epsilon) * w, over rows; one workgroup for each.
@compute @workgroup_size(256)
fn layer_norm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = group.x * args.width;
    var sum = 0.0;
    for (var i = thread; i < args.width; i += 256u) { sum += x[at + i]; }
    let mean = sum_threads(thread, sum, 256u) / f32(args.width);
    var squares = 0.0;
    for (var i = thread; i < args.width; i += 256u) {
        let d = x[at + i] - mean;
        squares = fma(d, d, squares);
    }
    let scale = 1.0 / sqrt(sum_threads(thread, squares, 256u) / f32(args.width) + args.alpha);
    for (var i = thread; i < args.width; i += 256u) { y[at + i] = (x[at + i] - mean) * scale * w[i]; }
}

@compute @workgroup_size(256)
fn add(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = place(group, thread);
    if i < args.count { x[i] += y[i]; }
}

// x[t] += w
@compute @workgroup_size(256)
fn add_bias(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = place(group, thread);
    if i < args.count { x[i] += w[i % args.width]; }
}

// x[t] *= w, which has a number for each of a row, or one for all.
@compute @workgroup_size(256)
fn scale(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = place(group, thread);
    if i < args.count { x[i] *= w[select(i % args.width, 0u, args.other == 1u)]; }
}

// x *= function(y). Each number of a row of y applies to width / other numbers of x.
@compute @workgroup_size(256)
fn gate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = place(group, thread);
    if i >= args.count { return; }
    var factor = y[i / (args.width / args.other)];
    switch args.kind {
        case 0u: { factor = sigmoid(factor); }
        case 1u: { factor = softplus(factor); }
        default: {}
    }
    x[i] *= factor;
}

// x = activation(x, y)
@compute @workgroup_size(256)
fn activate_all(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = place(group, thread);
    if i < args.count { x[i] = activate(x[i], y[i], Activation(args.kind, args.alpha, args.limit)); }
}

// x = limit * tanh(x / limit)
@compute @workgroup_size(256)
fn softcap(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = place(group, thread);
    if i < args.count { x[i] = args.limit * bounded_tanh(x[i] / args.limit); }
}

// y[t] = x[t] * sigmoid(max(w[t])): w has `other` logits a row.
@compute @workgroup_size(256)
fn weigh_by_best(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    var best = -INFINITE;
    for (var i = 0u; i < args.other; i++) { best = max(best, w[group.x * args.other + i]); }
    let factor = sigmoid(best);
    for (var i = thread; i < args.width; i += 256u) {
        y[group.x * args.width + i] = x[group.x * args.width + i] * factor;
    }
}

// Rotates every head of a row by the row's angles, which are in y: `[rows, cos... | sin...]`. A row of x has `width`
// numbers, a head `part`, of which twice `other` rotate.
@compute @workgroup_size(256)
fn rope(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = 256u * group.x + thread;
    let head = at / args.other;
    let i = at % args.other;
    if head >= args.width / args.part { return; }
    let angles = group.y * 2u * args.other;
    let cosine = y[angles + i];
    let sine = y[angles + args.other + i];
    let start = group.y * args.width + head * args.part;
    // Kind 1 rotates neighbours.
    let first = start + select(i, 2u * i, args.kind == 1u);
    let second = start + select(i + args.other, 2u * i + 1u, args.kind == 1u);
    let p = x[first];
    let q = x[second];
    x[first] = p * cosine - q * sine;
    x[second] = q * cosine + p * sine;
}

// One part of every group of a row of x, which has `width` numbers, to y, whose rows have `other`: `count` numbers of a
// row, `part` of each group of `kind`, from `first` on.
@compute @workgroup_size(256)
fn ungroup(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = 256u * group.x + thread;
    if i >= args.count { return; }
    let origin = group.y * args.width + i / args.part * args.kind + args.first + i % args.part;
    y[group.y * args.other + args.at + i] = x[origin];
}

// y[i] = x[w[i]], where w has row numbers.
@compute @workgroup_size(256)
fn pick(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let origin = bitcast<u32>(w[group.x]) * args.width;
    for (var i = thread; i < args.width; i += 256u) { y[group.x * args.width + i] = x[origin + i]; }
}
