
// Routers: choosing the experts of each token. EXPERTS, GROUPS and CHOSEN are the sizes of the router's lists.

struct Args {
    scores: u32,    // how logits become scores; the order is that of `choose` in choice.rs
    tolerance: f32, // of a sparse mixer
    groups: u32,    // 0 if experts are not in groups
    used: u32,      // groups that are chosen
    best_two: u32,  // whether a group is valued by its two best experts instead of one
    corrected: u32, // whether there is a correction, and whether there are factors
    factored: u32,
    normalise: u32,
    epsilon: f32, // added to the sum that weights are divided by
    scale: f32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> logits: array<f32>;     // [rows, EXPERTS]
@group(0) @binding(#) var<storage, read> correction: array<f32>; // [EXPERTS]
@group(0) @binding(#) var<storage, read> factors: array<f32>;    // [EXPERTS] of the final weights
@group(0) @binding(#) var<storage, read_write> experts: array<u32>; // [rows, CHOSEN] the best first
@group(0) @binding(#) var<storage, read_write> weights: array<f32>; // [rows, CHOSEN]

const THREADS: u32 = 256u;
const SIGMOIDS: u32 = 1u;
const SPARSE_MIXER: u32 = 2u;

var<workgroup> score: array<f32, EXPERTS>;
// What experts are chosen by, and the place of each among all.
var<workgroup> numbers: array<u32, EXPERTS>;
var<workgroup> ranks: array<u32, EXPERTS>;
var<workgroup> worth: array<u32, GROUPS>;
var<workgroup> chosen: array<u32, CHOSEN>;
var<workgroup> weight: array<f32, CHOSEN>;
var<workgroup> divisor: f32;

// Compares bits, because compilers may assume that no number is NaN.
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

// The integer of minus infinity, and of every NaN.
const LEAST: u32 = 0x007fffffu;

// Maps a float to an integer that is larger for a larger float, with both zeros equal.
fn order(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if is_nan(x) { return LEAST; }
    if bits == 0x80000000u { return bits; }
    return select(bits | 0x80000000u, ~bits, bits >> 31u == 1u);
}

// How many groups are worth more than this one; of equals, the lower index is worth more.
fn rank_of_group(group: u32) -> u32 {
    var rank = 0u;
    for (var i = 0u; i < args.groups; i++) {
        rank += u32(worth[i] > worth[group] || (worth[i] == worth[group] && i < group));
    }
    return rank;
}

// How many experts come before this one.
fn rank_of_expert(expert: u32) -> u32 {
    let mine = numbers[expert];
    var rank = 0u;
    for (var i = 0u; i < expert; i++) { rank += u32(numbers[i] >= mine); }
    for (var i = expert + 1u; i < EXPERTS; i++) { rank += u32(numbers[i] > mine); }
    return rank;
}

// The worth of a group.
fn worth_of(group: u32) -> u32 {
    let size = EXPERTS / args.groups;
    var best = -INFINITE;
    var second = -INFINITE;
    for (var i = group * size; i < (group + 1u) * size; i++) {
        var value = score[i];
        if args.corrected == 1u { value += correction[i]; }
        if is_nan(value) { value = -INFINITE; }
        if value > best {
            second = best;
            best = value;
        } else if value > second {
            second = value;
        }
    }
    if args.best_two == 1u && size > 1u { return order(best + second); }
    return order(best);
}

// The weight of an expert that a sparse mixer chooses: its softmax among the experts that are about as good and were
// not chosen before it.
fn mixed(rank: u32) -> f32 {
    let best = score[chosen[rank]];
    var sum = 0.0;
    for (var i = 0u; i < EXPERTS; i++) {
        let logit = score[i];
        // Of two zeros, the distance is not a number, so the comparison must not be turned round.
        let is_worse = (best - logit) / max(abs(logit), best) > args.tolerance;
        if ranks[i] >= rank && !is_worse { sum += exp(logit - best); }
    }
    return 1.0 / sum;
}

// One workgroup chooses for each row.
@compute @workgroup_size(256)
fn route(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.x;
    var largest = -INFINITE;
    for (var i = thread; i < EXPERTS; i += THREADS) {
        let logit = logits[row * EXPERTS + i];
        score[i] = logit;
        if args.scores == SIGMOIDS { score[i] = sigmoid(logit); }
        largest = max(largest, logit);
    }
    if args.scores == 0u {
        largest = max_threads(thread, largest, THREADS);
        var sum = 0.0;
        for (var i = thread; i < EXPERTS; i += THREADS) {
            score[i] = exp(score[i] - largest);
            sum += score[i];
        }
        sum = sum_threads(thread, sum, THREADS);
        for (var i = thread; i < EXPERTS; i += THREADS) { score[i] /= sum; }
    }
    for (var i = thread; i < EXPERTS; i += THREADS) {
        var value = score[i];
        if args.corrected == 1u { value += correction[i]; }
        numbers[i] = order(value);
    }
    workgroupBarrier();

    if args.groups > 0u {
        for (var i = thread; i < args.groups; i += THREADS) { worth[i] = worth_of(i); }
        workgroupBarrier();
        for (var i = thread; i < EXPERTS; i += THREADS) {
            if rank_of_group(i / (EXPERTS / args.groups)) >= args.used { numbers[i] = LEAST; }
        }
        workgroupBarrier();
    }

    for (var i = thread; i < EXPERTS; i += THREADS) {
        let rank = rank_of_expert(i);
        ranks[i] = rank;
        if rank < CHOSEN { chosen[rank] = i; }
    }
    workgroupBarrier();
    for (var k = thread; k < CHOSEN; k += THREADS) {
        if args.scores == SPARSE_MIXER { weight[k] = mixed(k); } else { weight[k] = score[chosen[k]]; }
    }
    workgroupBarrier();
    if thread == 0u {
        var sum = 0.0;
        for (var k = 0u; k < CHOSEN; k++) { sum += weight[k]; }
        divisor = select(1.0, sum + args.epsilon, args.normalise == 1u);
    }
    workgroupBarrier();
    for (var k = thread; k < CHOSEN; k += THREADS) {
        var final_weight = weight[k] / divisor * args.scale;
        if args.factored == 1u { final_weight *= factors[chosen[k]]; }
        experts[row * CHOSEN + k] = chosen[k];
        weights[row * CHOSEN + k] = final_weight;
    }
}
