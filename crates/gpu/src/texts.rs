//! The texts of all kernels, for tests that translate them.

use crate::device::Variants;
use crate::shaders::{ARRAY, Cell, Constants, File, Half, HeapView, Name};
use crate::weights::{Source, WeightKind};

/// Constants that a file's kernels are compiled with, so that each part of the text is in some kernel.
struct Example {
    file: File,
    names: &'static [&'static str],
    values: &'static [&'static [u32]],
    reads: Reads,
}

/// What a file's kernels read besides activations.
enum Reads {
    Nothing,
    /// At most this many matrices.
    Matrices(usize),
    /// At most this many matrices of experts.
    Experts(usize),
    /// The heap, in these cells.
    Heap(&'static [Cell]),
}

const ATTENTION: [&str; 7] = ["KEY_DIM", "VALUE_DIM", "KV_HEADS", "LATENT", "HEADS", "QUERIES", "PREPARES"];
const OF_ATTENTION: [&[u32]; 3] =
    [&[128, 128, 4, 0, 8, 32, 1], &[192, 128, 2, 0, 1, 32, 0], &[576, 512, 1, 1, 8, 16, 0]];
const CELLS: [Cell; 2] = [Cell::FourSingles, Cell::FourHalves];
const APART: [&str; 4] = ["WINDOW", "ENTRY", "TILED", "ROWS"];
const OF_APART: [&[u32]; 2] = [&[8, 10, 0, 1], &[8, 10, 1, 2]];
const TILES: [&str; 5] = ["WINDOW", "ENTRY", "TILED", "TOKENS", "WIDE"];
const OF_TILES: [&[u32]; 2] = [&[8, 10, 1, 32, 0], &[8, 10, 1, 64, 1]];
const MATRICES: [&str; 5] = ["WINDOW", "ENTRY", "TILED", "TOKENS", "SLOTS"];
const OF_MATRICES: [&[u32]; 2] = [&[8, 10, 1, 32, 1], &[8, 10, 1, 64, 2]];

/// Kernels for a half of experts.
const fn experts(
    file: File,
    names: &'static [&'static str],
    values: &'static [&'static [u32]],
    most: usize,
) -> Example {
    Example { file, names, values, reads: Reads::Experts(most) }
}

/// All files.
const EXAMPLES: [Example; 21] = [
    Example { file: File::Rows, names: &[], values: &[&[]], reads: Reads::Nothing },
    Example { file: File::Embed, names: &[], values: &[&[]], reads: Reads::Matrices(1) },
    Example {
        file: File::Products,
        names: &["TOKENS", "ROWS", "ANY_MIN", "NORM", "ADDED"],
        values: &[&[1, 1, 1, 0, 0], &[4, 4, 0, 0, 0], &[1, 2, 1, 1, 1], &[1, 1, 0, 1, 0]],
        reads: Reads::Matrices(4),
    },
    Example {
        file: File::Tiles,
        names: &["TOKENS", "WIDE"],
        values: &[&[32, 0], &[64, 1]],
        reads: Reads::Matrices(4),
    },
    Example { file: File::Matrices, names: &["TOKENS"], values: &[&[64], &[128]], reads: Reads::Matrices(4) },
    Example { file: File::Halve, names: &[], values: &[&[]], reads: Reads::Nothing },
    Example { file: File::Heads, names: &[], values: &[&[]], reads: Reads::Matrices(1) },
    Example {
        file: File::Routing,
        names: &["EXPERTS", "GROUPS", "CHOSEN"],
        values: &[&[512, 8, 8], &[64, 1, 4]],
        reads: Reads::Nothing,
    },
    Example { file: File::Best, names: &[], values: &[&[]], reads: Reads::Nothing },
    experts(File::Experts(Half::Gate), &APART, &OF_APART, 2),
    experts(File::Experts(Half::Down), &APART, &OF_APART, 1),
    experts(File::ExpertTiles(Half::Gate), &TILES, &OF_TILES, 2),
    experts(File::ExpertTiles(Half::Down), &TILES, &OF_TILES, 1),
    experts(File::ExpertMatrices(Half::Gate), &MATRICES, &OF_MATRICES, 2),
    experts(File::ExpertMatrices(Half::Down), &MATRICES, &OF_MATRICES, 1),
    Example { file: File::Mixing, names: &["EXPERTS"], values: &[&[128]], reads: Reads::Nothing },
    Example { file: File::Speed, names: &[], values: &[&[]], reads: Reads::Nothing },
    Example { file: File::Rotate, names: &[], values: &[&[]], reads: Reads::Nothing },
    Example { file: File::Attention, names: &ATTENTION, values: &OF_ATTENTION, reads: Reads::Heap(&CELLS) },
    Example { file: File::Prompt, names: &ATTENTION, values: &OF_ATTENTION, reads: Reads::Heap(&CELLS) },
    Example {
        file: File::Delta,
        names: &["KEY_DIM", "VALUE_DIM"],
        values: &[&[128, 128], &[64, 96]],
        reads: Reads::Heap(&[Cell::Single]),
    },
];

/// The text of every kernel for GPUs with these variants, and what it is for: with each kind of matrix, and with as many
/// matrices as it can read.
#[doc(hidden)]
pub fn kernel_texts(variants: Variants) -> impl Iterator<Item = (String, String)> {
    let examples =
        EXAMPLES.iter().filter(move |example| variants.matrices || !example.file.multiplies_matrices());
    examples.flat_map(names).map(move |mut name| {
        if let (true, Some(window)) = (variants.arrays, window(&mut name)) {
            *window = ARRAY;
        }
        let kinds: Vec<WeightKind> = name.slots.iter().map(|slot| slot.kind).collect();
        let what = format!("{:?} of {kinds:?} with {:?} and {:?}", name.file, name.constants, name.heap);
        (what, name.text(variants, 32))
    })
}

/// The number of buffers with experts that a kernel is bound to.
fn window(name: &mut Name) -> Option<&mut u32> {
    name.constants.iter_mut().find(|(name, _)| *name == "WINDOW").map(|(_, window)| window)
}

fn names(example: &Example) -> Vec<Name> {
    let constants =
        |values: &[u32]| -> Constants { example.names.iter().copied().zip(values.iter().copied()).collect() };
    let with = |values: &&[u32]| Name { constants: constants(values), ..Name::new(example.file, "all") };
    let plain = example.values.iter().map(with);
    match example.reads {
        Reads::Nothing => plain.collect(),
        Reads::Matrices(most) => plain.flat_map(|name| reading(&name, most, false)).collect(),
        Reads::Experts(most) => plain.flat_map(|name| reading(&name, most, true)).collect(),
        Reads::Heap(cells) => {
            let view = |&cell: &Cell| HeapView { blocks: 3, cell };
            plain.flat_map(|name| cells.iter().map(move |cell| name.clone().reaching(view(cell)))).collect()
        }
    }
}

/// A kernel with one matrix of each kind, and with several matrices.
fn reading(name: &Name, most: usize, experts: bool) -> Vec<Name> {
    let source = |kind, aligned| Source { kind, aligned, experts };
    let one = |kind| [true, false].map(|aligned| name.clone().reading([source(kind, aligned)]));
    let several = [WeightKind::F32, WeightKind::IQ2_S, WeightKind::AFFINE4, WeightKind::IQ1_M];
    let several = several.into_iter().take(most).map(|kind| source(kind, true));
    let mut names: Vec<Name> = WeightKind::ALL.into_iter().flat_map(one).collect();
    names.push(name.clone().reading(several));
    names
}
