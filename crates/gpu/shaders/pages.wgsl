
// Attention over keys and values in pages, of any shape.
//
// A page holds PAGE positions: keys [KV_HEADS, PAGE, KEY_DIM], then values [KV_HEADS, PAGE, VALUE_DIM], or, where values
// are the last channels of their keys (LATENT), keys alone.
//
// Softmax is computed page by page, and anew for each SEGMENT of positions; then the segments are merged in order. Pages
// and segments start at multiples of their length, so neither what a batch consists of nor how segments are divided
// among workgroups changes a bit.

const PAGE: u32 = 64u;
const SEGMENT: u32 = 256u;
const THREADS: u32 = 128u;
// Less than any score.
const LOWEST: f32 = -1e30;

// Groups of four channels.
const KEY_FOURS: u32 = KEY_DIM / 4u;
const VALUE_FOURS: u32 = VALUE_DIM / 4u;
const OWN_FOURS: u32 = KEY_FOURS - LATENT * VALUE_FOURS;
// Between the values of neighbouring positions.
const VALUE_STEP: u32 = select(VALUE_FOURS, KEY_FOURS, LATENT == 1u);

struct Args {
    q_heads: u32,
    splits: u32,  // workgroups that share the segments of a row
    segments: u32, // the most segments of a row
    window: u32,  // positions that a query sees, or 0 for all
    chunked: u32, // whether these are the ones of its chunk, instead of the last ones
    appends: u32, // whether keys and values of the rows are still to be stored
    sunk: u32,    // whether there are sinks
    scale: f32,
    half: u32, // pairs of channels that rotate, where heads are still to be prepared
    interleaved: u32, // whether neighbours rotate together
    q_normed: u32,
    k_normed: u32,
    eps: f32,
}
var<immediate> args: Args;

// Of each row the place of its sequence's page table, and its position; then the page tables.
@group(0) @binding(#) var<storage, read> batch: array<u32>;
// Of prompts: the first row of each workgroup, and the number of its rows.
@group(0) @binding(#) var<storage, read> listed: array<u32>;
@group(0) @binding(#) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> sinks: array<f32>;
@group(0) @binding(#) var<storage, read> q_norm: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> k_norm: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> angles: array<vec4<f32>>; // [rows, cos... | sin...]
@group(0) @binding(#) var<storage, read_write> out: array<vec4<f32>>;
// [rows, segments, q_heads] of the running softmax, then as many values.
@group(0) @binding(#) var<storage, read_write> partial_values: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read_write> partial_sums: array<vec2<f32>>;

// The first position that the last of `end` positions sees.
fn start_of(end: u32) -> u32 {
    if args.window == 0u { return 0u; }
    if args.chunked != 0u { return (end - 1u) / args.window * args.window; }
    return end - min(end, args.window);
}

fn page_of(row: u32, position: u32) -> Piece { return piece_at(batch[batch[2u * row] + position / PAGE]); }

// The first cell of a key and of a value in a page.
fn key_place(kv_head: u32, position: u32) -> u32 { return (kv_head * PAGE + position % PAGE) * KEY_FOURS; }

fn value_place(kv_head: u32, position: u32) -> u32 {
    if LATENT == 1u { return key_place(kv_head, position) + OWN_FOURS; }
    return KV_HEADS * PAGE * KEY_FOURS + (kv_head * PAGE + position % PAGE) * VALUE_FOURS;
}

// Stores four channels of a row's own key and value.
fn append_four(row: u32, kv_head: u32, i: u32) {
    let position = batch[2u * row + 1u];
    let page = page_of(row, position);
    let at = row * KV_HEADS + kv_head;
    if i < OWN_FOURS {
        set_cell(page, key_place(kv_head, position) + i, cell_of(k[at * OWN_FOURS + i]));
    } else {
        let channel = i - OWN_FOURS;
        set_cell(page, value_place(kv_head, position) + channel, cell_of(v[at * VALUE_FOURS + channel]));
    }
}

// What the softmax of one query has seen: the highest score, the sum of the exponentials, and four channels of the
// weighted sum of values.
struct Seen { high: f32, sum: f32, values: vec4<f32> }

fn nothing_seen() -> Seen { return Seen(LOWEST, 0.0, vec4<f32>(0.0)); }

fn merged(a: Seen, b: Seen) -> Seen {
    let high = max(a.high, b.high);
    let of_a = exp(a.high - high);
    let of_b = exp(b.high - high);
    let values = fma(a.values, vec4<f32>(of_a), b.values * of_b);
    return Seen(high, fma(a.sum, of_a, b.sum * of_b), values);
}

// The four channels of attention's output.
fn finished(seen: Seen, head: u32) -> vec4<f32> {
    var all = seen;
    if args.sunk != 0u { all = merged(all, Seen(sinks[head], 1.0, vec4<f32>(0.0))); }
    return all.values / all.sum;
}

fn partial_at(row: u32, segment: u32, head: u32) -> u32 {
    return (row * args.segments + segment) * args.q_heads + head;
}

// The product of four channels, added in order.
fn product(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
