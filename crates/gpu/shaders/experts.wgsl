
// Matrices of the chosen experts: which are computed, and where they are.

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
// For each expert of the layer: the arena that has it, or NOWHERE, and the byte where each of its ranges starts there.
@group(0) @binding(#) var<storage, read> table: array<u32>;
// Either the expert of each pair, or tiles: an expert, the first of its places, how many there are, and nothing.
@group(0) @binding(#) var<storage, read> jobs: array<u32>;
@group(0) @binding(#) var<storage, read_write> out: array<f32>;

// The current expert's words in the table, of which each expert has ENTRY.
var<private> entry: u32;

// Rows of x for one expert.
struct Job { expert: u32, first: u32, count: u32 }

fn job_of(number: u32) -> Job {
    if TILED == 0u { return Job(jobs[number], number, 1u); }
    return Job(jobs[4u * number], jobs[4u * number + 1u], jobs[4u * number + 2u]);
}

// Makes an expert the current one. False if its arena is not bound.
fn find(expert: u32, first_arena: u32) -> bool {
    entry = ENTRY * expert;
    arena = table[entry] - first_arena;
    return arena < WINDOW;
}

// Where the current expert's matrix begins. `ranges` has the numbers of the ranges of codes, scales and biases.
fn planes_in(m: Matrix, ranges: u32) -> Planes {
    return Planes(m.codes + table[entry + 1u + (ranges & 255u)],
                  m.scales + table[entry + 1u + ((ranges >> 8u) & 255u)],
                  m.biases + table[entry + 1u + (ranges >> 16u)]);
}
