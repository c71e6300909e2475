
// Linear attention by the gated delta rule, token by token, and the convolution before it.
//
// State of a sequence in a layer: the last inputs of the convolution [kernel - 1, channels], then the states of the
// heads in blocks of columns [value_heads, blocks, KEY_DIM, COLUMNS].

const COLUMNS: u32 = 32u;
const NORM_EPS: f32 = 1e-6;
// The address of no state: all zeros.
const NOWHERE: u32 = 0xffffffffu;

struct Args {
    channels: u32,
    kernel: u32, // positions that the convolution spans
    together: u32, // channels that a workgroup convolves
    activates: u32, // whether SiLU follows
    normed: u32, // of the first channels, those `together` are scaled to length one
    query_scale: f32, // a factor of the first half of those
    key_heads: u32,
    value_heads: u32,
    interleaved: u32, // whether value head i uses key head i % key_heads
}
var<immediate> args: Args;

// Tokens of a sequence between two stored states.
struct Stretch {
    row: u32, // in the batch
    count: u32,
    start: u32, // tokens of the sequence before them
    before: u32, // addresses of states
    after: u32,
}

@group(0) @binding(#) var<storage, read> stretches: array<Stretch>;
@group(0) @binding(#) var<storage, read> filters: array<f32>; // [kernel, channels]
@group(0) @binding(#) var<storage, read> x: array<f32>; // [rows, channels]
@group(0) @binding(#) var<storage, read_write> convolved: array<f32>; // [rows, channels]
@group(0) @binding(#) var<storage, read> a: array<f32>; // [rows, value_heads]
@group(0) @binding(#) var<storage, read> b: array<f32>; // [rows, value_heads]
@group(0) @binding(#) var<storage, read> rates: array<f32>; // [value_heads]
@group(0) @binding(#) var<storage, read> biases: array<f32>; // [value_heads]
@group(0) @binding(#) var<storage, read_write> out: array<f32>; // [rows, value_heads * VALUE_DIM]

// The convolution's input at index `i` of a stretch, counted from the first stored input.
fn input(s: Stretch, i: u32, channel: u32) -> f32 {
    let kept = args.kernel - 1u;
    if i >= kept { return x[(s.row + i - kept) * args.channels + channel]; }
    if s.start + i < kept || s.before == NOWHERE { return 0.0; }
    return cell(piece_at(s.before), i * args.channels + channel);
}

// A workgroup convolves some channels of a token. Beyond the last token, it stores inputs.
@compute @workgroup_size(128)
fn convolve(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let s = stretches[group.z];
    let token = group.y;
    let first = group.x * args.together;
    let end = min(first + args.together, args.channels);
    let at = (s.row + token) * args.channels;
    var squares = 0.0;
    for (var channel = first + thread; channel < end; channel += 128u) {
        if token < args.kernel - 1u {
            set_cell(piece_at(s.after), token * args.channels + channel, input(s, s.count + token, channel));
        }
        if token < s.count {
            var sum = 0.0;
            for (var j = 0u; j < args.kernel; j++) {
                sum = fma(filters[j * args.channels + channel], input(s, token + j, channel), sum);
            }
            if args.activates != 0u { sum *= sigmoid(sum); }
            convolved[at + channel] = sum;
            squares = fma(sum, sum, squares);
        }
    }
    if first >= args.normed || token >= s.count { return; }
    let length = select(1.0, args.query_scale, first < args.normed / 2u);
    let factor = length / sqrt(sum_threads(thread, squares, 128u) + NORM_EPS);
    for (var channel = first + thread; channel < end; channel += 128u) { convolved[at + channel] *= factor; }
}

// The threads of a workgroup share the rows of a state.
const PARTS: u32 = 8u;
const ROWS_EACH: u32 = (KEY_DIM + PARTS - 1u) / PARTS;

var<workgroup> query: array<f32, KEY_DIM>;
var<workgroup> key: array<f32, KEY_DIM>;
var<workgroup> found: array<f32, PARTS * COLUMNS>;
var<workgroup> answers: array<f32, PARTS * COLUMNS>;

// A workgroup computes COLUMNS columns of one head. Each thread has every PARTSth row of one of them.
@compute @workgroup_size(256)
fn recur(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let s = stretches[group.z];
    let head = group.y;
    let lane = thread % COLUMNS;
    let part = thread / COLUMNS;
    let column = group.x * COLUMNS + lane;
    let key_head = select(head / (args.value_heads / args.key_heads), head % args.key_heads, args.interleaved != 0u);
    let keys = args.key_heads * KEY_DIM;
    let blocks = (VALUE_DIM + COLUMNS - 1u) / COLUMNS;
    let at = (args.kernel - 1u) * args.channels + (head * blocks + group.x) * KEY_DIM * COLUMNS + lane;
    var state: array<f32, ROWS_EACH>;
    for (var n = 0u; n < ROWS_EACH; n++) {
        let i = part + PARTS * n;
        state[n] = 0.0;
        if i < KEY_DIM && s.before != NOWHERE { state[n] = cell(piece_at(s.before), at + i * COLUMNS); }
    }
    for (var token = 0u; token < s.count; token++) {
        let row = s.row + token;
        let channels = row * args.channels;
        workgroupBarrier();
        for (var i = thread; i < KEY_DIM; i += 256u) {
            query[i] = convolved[channels + key_head * KEY_DIM + i];
            key[i] = convolved[channels + keys + key_head * KEY_DIM + i];
        }
        var value = 0.0;
        if column < VALUE_DIM { value = convolved[channels + 2u * keys + head * VALUE_DIM + column]; }
        let gate = row * args.value_heads + head;
        let keep = exp(rates[head] * softplus(a[gate] + biases[head]));
        let correct = sigmoid(b[gate]);
        workgroupBarrier();
        var sum = 0.0;
        for (var n = 0u; n < ROWS_EACH; n++) {
            let i = part + PARTS * n;
            if i < KEY_DIM { sum = fma(key[i], state[n], sum); }
        }
        found[thread] = sum;
        workgroupBarrier();
        sum = 0.0;
        for (var i = 0u; i < PARTS; i++) { sum += found[i * COLUMNS + lane]; }
        let delta = correct * (value - keep * sum);
        sum = 0.0;
        for (var n = 0u; n < ROWS_EACH; n++) {
            let i = part + PARTS * n;
            if i < KEY_DIM {
                state[n] = fma(key[i], delta, keep * state[n]);
                sum = fma(query[i], state[n], sum);
            }
        }
        answers[thread] = sum;
        workgroupBarrier();
        if part == 0u && column < VALUE_DIM {
            sum = 0.0;
            for (var i = 0u; i < PARTS; i++) { sum += answers[i * COLUMNS + lane]; }
            out[(row * args.value_heads + head) * VALUE_DIM + column] = sum;
        }
    }
    for (var n = 0u; n < ROWS_EACH; n++) {
        let i = part + PARTS * n;
        if i < KEY_DIM { set_cell(piece_at(s.after), at + i * COLUMNS, state[n]); }
    }
}
