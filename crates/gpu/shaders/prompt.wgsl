
// Attention of many rows of a sequence, which share the keys that a workgroup loads.

// A workgroup has QUERIES queries: heads of one key head, of consecutive rows.

// Groups of four channels in workgroup memory at a time, and their room there: in an odd number of banks.
const STAGE: u32 = 8u;
const STAGE_ROOM: u32 = STAGE + 1u;
const SCORE_ROOM: u32 = PAGE + 4u;

// Each thread computes the scores of four queries and KEYS keys, and some channels of four queries.
const LANES: u32 = THREADS / (QUERIES / 4u);
const KEYS: u32 = PAGE / LANES;
const FOURS_EACH: u32 = (VALUE_FOURS + LANES - 1u) / LANES;
const SOFT_LANES: u32 = THREADS / QUERIES;
const KEYS_EACH: u32 = PAGE / SOFT_LANES;

// Keys whose values are read before any of them is used.
const KEYS_AHEAD: u32 = 4u;

var<workgroup> staged_queries: array<vec4<f32>, QUERIES * STAGE_ROOM>;
var<workgroup> staged_keys: array<vec4<f32>, PAGE * STAGE_ROOM>;
var<workgroup> scores: array<f32, QUERIES * SCORE_ROOM>;
var<workgroup> highs: array<f32, QUERIES>;
var<workgroup> factors: array<f32, QUERIES>;

// A workgroup computes some rows and up to HEADS query heads of one key head.
@compute @workgroup_size(128)
fn attend(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let sharing = args.q_heads / KV_HEADS;
    let tiles = (sharing + HEADS - 1u) / HEADS;
    let kv_head = group.x / tiles;
    let in_group = group.x % tiles * HEADS;
    let heads = min(HEADS, sharing - in_group);
    let first_head = kv_head * sharing + in_group;
    let first_row = listed[2u * group.y];
    let rows = listed[2u * group.y + 1u];
    // Positions that some query sees.
    let start = start_of(batch[2u * first_row + 1u] + 1u);
    let end = batch[2u * (first_row + rows - 1u) + 1u] + 1u;

    // The query of this thread's part of the softmax.
    let soft_query = thread / SOFT_LANES;
    let soft_lane = thread % SOFT_LANES;
    let soft_end = batch[2u * (first_row + min(soft_query / HEADS, rows - 1u)) + 1u] + 1u;
    let soft_start = start_of(soft_end);
    let lane = thread % LANES;
    let own = 4u * (thread / LANES);

    var all: array<Seen, 4u * FOURS_EACH>;
    for (var i = 0u; i < 4u * FOURS_EACH; i++) { all[i] = nothing_seen(); }
    for (var segment = start / SEGMENT; segment * SEGMENT < end; segment++) {
        let last = min(end, (segment + 1u) * SEGMENT);
        var values: array<vec4<f32>, 4u * FOURS_EACH>;
        for (var i = 0u; i < 4u * FOURS_EACH; i++) { values[i] = vec4<f32>(0.0); }
        var sum = vec4<f32>(0.0);
        var high = vec4<f32>(LOWEST);
        var soft_high = LOWEST;
        for (var first = max(start, segment * SEGMENT) / PAGE * PAGE; first < last; first += PAGE) {
            let page = page_of(first_row, first);
            let from_key = max(start, first) - first;
            let to_key = min(PAGE, last - first);

            var products: array<f32, 4u * KEYS>;
            for (var i = 0u; i < 4u * KEYS; i++) { products[i] = 0.0; }
            for (var stage = 0u; stage < KEY_FOURS; stage += STAGE) {
                let fours = min(STAGE, KEY_FOURS - stage);
                for (var i = thread; i < QUERIES * STAGE; i += THREADS) {
                    let u = i / STAGE;
                    let row = first_row + u / HEADS;
                    let four = i % STAGE;
                    if u / HEADS < rows && u % HEADS < heads && four < fours {
                        let head = row * args.q_heads + first_head + u % HEADS;
                        staged_queries[u * STAGE_ROOM + four] = q[head * KEY_FOURS + stage + four];
                    }
                }
                for (var i = thread; i < PAGE * STAGE; i += THREADS) {
                    let key = i / STAGE;
                    let four = i % STAGE;
                    if key >= from_key && key < to_key && four < fours {
                        let place = key_place(kv_head, key) + stage + four;
                        staged_keys[key * STAGE_ROOM + four] = floats_of(cell(page, place));
                    }
                }
                workgroupBarrier();
                for (var four = 0u; four < fours; four++) {
                    var keys: array<vec4<f32>, KEYS>;
                    for (var m = 0u; m < KEYS; m++) { keys[m] = staged_keys[(lane + LANES * m) * STAGE_ROOM + four]; }
                    for (var n = 0u; n < 4u; n++) {
                        let query = staged_queries[(own + n) * STAGE_ROOM + four];
                        for (var m = 0u; m < KEYS; m++) {
                            products[KEYS * n + m] = product(query, keys[m], products[KEYS * n + m]);
                        }
                    }
                }
                workgroupBarrier();
            }
            for (var i = 0u; i < 4u * KEYS; i++) {
                scores[(own + i / KEYS) * SCORE_ROOM + lane + LANES * (i % KEYS)] = products[i] * args.scale;
            }
            workgroupBarrier();

            var highest = soft_high;
            for (var i = 0u; i < KEYS_EACH; i++) {
                let key = soft_lane + SOFT_LANES * i;
                if first + key >= soft_start && first + key < soft_end {
                    highest = max(highest, scores[soft_query * SCORE_ROOM + key]);
                }
            }
            highest = max_threads(thread, highest, SOFT_LANES);
            for (var i = 0u; i < KEYS_EACH; i++) {
                let key = soft_lane + SOFT_LANES * i;
                let at = soft_query * SCORE_ROOM + key;
                let seen = first + key >= soft_start && first + key < soft_end;
                scores[at] = select(0.0, exp(scores[at] - highest), seen);
            }
            if soft_lane == 0u {
                highs[soft_query] = highest;
                factors[soft_query] = exp(soft_high - highest);
            }
            soft_high = highest;
            workgroupBarrier();

            high = vec4<f32>(highs[own], highs[own + 1u], highs[own + 2u], highs[own + 3u]);
            let factor = vec4<f32>(factors[own], factors[own + 1u], factors[own + 2u], factors[own + 3u]);
            sum *= factor;
            for (var m = 0u; m < FOURS_EACH; m++) {
                for (var n = 0u; n < 4u; n++) { values[4u * m + n] *= factor[n]; }
            }
            for (var first_key = from_key; first_key < to_key; first_key += KEYS_AHEAD) {
                var read: array<vec4<f32>, KEYS_AHEAD * FOURS_EACH>;
                for (var j = 0u; j < KEYS_AHEAD; j++) {
                    let place = value_place(kv_head, min(first_key + j, to_key - 1u));
                    for (var m = 0u; m < FOURS_EACH; m++) {
                        let four = min(lane + LANES * m, VALUE_FOURS - 1u);
                        read[j * FOURS_EACH + m] = floats_of(cell(page, place + four));
                    }
                }
                for (var j = 0u; j < KEYS_AHEAD; j++) {
                    let key = first_key + j;
                    if key >= to_key { break; }
                    let weight = vec4<f32>(
                        scores[own * SCORE_ROOM + key],
                        scores[(own + 1u) * SCORE_ROOM + key],
                        scores[(own + 2u) * SCORE_ROOM + key],
                        scores[(own + 3u) * SCORE_ROOM + key],
                    );
                    sum += weight;
                    for (var m = 0u; m < FOURS_EACH; m++) {
                        let value = read[j * FOURS_EACH + m];
                        values[4u * m] = fma(vec4<f32>(weight.x), value, values[4u * m]);
                        values[4u * m + 1u] = fma(vec4<f32>(weight.y), value, values[4u * m + 1u]);
                        values[4u * m + 2u] = fma(vec4<f32>(weight.z), value, values[4u * m + 2u]);
                        values[4u * m + 3u] = fma(vec4<f32>(weight.w), value, values[4u * m + 3u]);
                    }
                }
            }
            workgroupBarrier();
        }
        for (var i = 0u; i < 4u * FOURS_EACH; i++) {
            all[i] = merged(all[i], Seen(high[i % 4u], sum[i % 4u], values[i]));
        }
    }
    for (var i = 0u; i < 4u * FOURS_EACH; i++) {
        let u = own + i % 4u;
        let four = lane + LANES * (i / 4u);
        if u / HEADS >= rows || u % HEADS >= heads || four >= VALUE_FOURS { continue; }
        let head = first_head + u % HEADS;
        out[((first_row + u / HEADS) * args.q_heads + head) * VALUE_FOURS + four] = finished(all[i], head);
    }
}
