//! Puts kernels together from text, and compiles them when they are first used.
//!
//! A kernel's text is `common.wgsl`, the way in which threads add up, an unpacker for each matrix that it reads, and its
//! own file. Text between `//each {` and `//}` is repeated for each of these matrices, its *slots*, with the slot's
//! number in place of `$`. Text between `//when NAME {` and `//}` is there only if that constant is not zero. A kernel's
//! buffers are read off its text.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_engine::{Error, Result};
use smallvec::SmallVec;

use crate::device::{Gpu, IMMEDIATES, Variants};
use crate::grids;
use crate::weights::{Source, WeightKind};

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum File {
    /// Operations on rows of activations.
    Rows,
    /// Rows of a matrix as floats.
    Embed,
    /// Products of matrices with one or a few rows of activations.
    Products,
    /// Products of matrices with many rows.
    Tiles,
    /// The same by products of small matrices.
    Matrices,
    /// Activations as halves for these.
    Halve,
    /// Products of each head with its own matrix.
    Heads,
    /// Routers' choices.
    Routing,
    /// Candidates for the likeliest tokens.
    Best,
    /// The halves of experts, for few rows of activations.
    Experts(Half),
    /// The same for many rows.
    ExpertTiles(Half),
    /// The same by products of small matrices.
    ExpertMatrices(Half),
    /// Sorting pairs by expert, and adding experts' outputs.
    Mixing,
    /// Norms and rotations of heads.
    Rotate,
    /// Attention of single rows, of any shape.
    Attention,
    /// Attention of many rows of a sequence.
    Prompt,
    /// Linear attention, and convolutions.
    Delta,
    /// Reading memory, to measure that.
    Speed,
}

/// A half of the computation of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// The activation of the products with gate and up.
    Gate,
    /// The product with down.
    Down,
}

/// The text of kernels for a half of experts.
macro_rules! of_experts {
    ($half:literal, $($file:literal),+) => {
        concat!(
            include_str!("../shaders/experts.wgsl"),
            include_str!(concat!("../shaders/experts_", $half, ".wgsl")),
            $(include_str!(concat!("../shaders/experts_", $file, ".wgsl"))),+
        )
    };
}

impl File {
    /// Whether its kernels multiply small matrices.
    pub fn multiplies_matrices(self) -> bool {
        matches!(self, File::Matrices | File::ExpertMatrices(_))
    }

    fn text(self) -> &'static str {
        match self {
            File::Rows => include_str!("../shaders/rows.wgsl"),
            File::Embed => include_str!("../shaders/embed.wgsl"),
            File::Products => include_str!("../shaders/products.wgsl"),
            File::Tiles => include_str!("../shaders/tiles.wgsl"),
            File::Matrices => include_str!("../shaders/matrices.wgsl"),
            File::Halve => include_str!("../shaders/halve.wgsl"),
            File::Heads => include_str!("../shaders/heads.wgsl"),
            File::Routing => include_str!("../shaders/routing.wgsl"),
            File::Best => include_str!("../shaders/best.wgsl"),
            File::Experts(Half::Gate) => of_experts!("gate", "apart"),
            File::Experts(Half::Down) => of_experts!("down", "apart", "sum"),
            File::ExpertTiles(Half::Gate) => of_experts!("gate", "tiles"),
            File::ExpertTiles(Half::Down) => of_experts!("down", "tiles"),
            File::ExpertMatrices(Half::Gate) => of_experts!("gate", "matrices"),
            File::ExpertMatrices(Half::Down) => of_experts!("down", "matrices"),
            File::Mixing => include_str!("../shaders/mixing.wgsl"),
            File::Rotate => include_str!("../shaders/rotate.wgsl"),
            File::Attention => {
                concat!(include_str!("../shaders/pages.wgsl"), include_str!("../shaders/attention.wgsl"))
            }
            File::Prompt => {
                concat!(include_str!("../shaders/pages.wgsl"), include_str!("../shaders/prompt.wgsl"))
            }
            File::Delta => include_str!("../shaders/delta.wgsl"),
            File::Speed => include_str!("../shaders/speed.wgsl"),
        }
    }
}

/// Constants of a kernel's text, by name.
pub type Constants = SmallVec<[(&'static str, u32); 4]>;

/// Identifies a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Its file.
    pub file: File,
    /// Its function.
    pub entry: &'static str,
    /// The matrices that it reads.
    pub slots: SmallVec<[Source; 4]>,
    /// Constants of its text, by name.
    pub constants: Constants,
    /// The heap, if it reaches that.
    pub heap: Option<HeapView>,
}

/// How a kernel reaches the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeapView {
    /// The number of blocks.
    pub blocks: u32,
    /// What it reads and writes at a time.
    pub cell: Cell,
}

/// What a kernel reads and writes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cell {
    /// A number.
    Single,
    /// Four numbers of type f32.
    FourSingles,
    /// Four numbers of type f16.
    FourHalves,
}

impl HeapView {
    fn text(self) -> String {
        let cell = match self.cell {
            Cell::Single => "alias Cell = f32;\nconst CELL_BYTES: u32 = 4u;\n",
            Cell::FourSingles => include_str!("../shaders/cells_singles.wgsl"),
            Cell::FourHalves => include_str!("../shaders/cells_halves.wgsl"),
        };
        let blocks = format!("const BLOCKS: u32 = {}u;\n", self.blocks);
        blocks + cell + &repeat(include_str!("../shaders/heap.wgsl"), self.blocks as usize)
    }
}

impl Name {
    /// A kernel that reads no matrix.
    pub fn new(file: File, entry: &'static str) -> Name {
        Name { file, entry, slots: SmallVec::new(), constants: SmallVec::new(), heap: None }
    }

    /// The same kernel for these matrices.
    pub fn reading(mut self, slots: impl IntoIterator<Item = Source>) -> Name {
        self.slots.extend(slots);
        self
    }

    /// The same kernel with a constant.
    pub fn with(mut self, name: &'static str, value: u32) -> Name {
        self.constants.push((name, value));
        self
    }

    /// Whether its first buffer has the grids. The recorder binds it.
    pub fn has_grids(&self) -> bool {
        self.slots.iter().any(|slot| slot.kind.has_grid())
    }

    /// The same kernel with the heap.
    pub fn reaching(mut self, heap: HeapView) -> Name {
        self.heap = Some(heap);
        self
    }

    /// Its text for a GPU with these variants and subgroups of at least this size.
    pub fn text(&self, variants: Variants, subgroup: u32) -> String {
        let mut text = String::new();
        if variants.halves {
            text.push_str("enable f16;\n");
        }
        if self.file.multiplies_matrices() {
            text.push_str("enable wgpu_cooperative_matrix;\n");
        }
        let experts = self.slots.iter().any(|slot| slot.experts);
        if variants.arrays && experts {
            text.push_str("enable wgpu_binding_array;\n");
        }
        text.push_str(&format!("const SUBGROUP: u32 = {subgroup}u;\n"));
        for (name, value) in &self.constants {
            text.push_str(&format!("const {name}: u32 = {value}u;\n"));
        }
        text.push_str(include_str!("../shaders/common.wgsl"));
        text.push_str(if variants.subgroups {
            include_str!("../shaders/sums_subgroups.wgsl")
        } else {
            include_str!("../shaders/sums_plain.wgsl")
        });
        if !self.slots.is_empty() {
            text.push_str(include_str!("../shaders/matrix.wgsl"));
        }
        if self.has_grids() {
            text.push_str(&grids::declaration());
        }
        if experts {
            let window = self.constants.iter().find(|(name, _)| *name == "WINDOW");
            text.push_str(&arenas(variants, window.expect("kernels for experts have a window").1));
        }
        for (number, source) in self.slots.iter().enumerate() {
            text.push_str(&source.text().replace('$', &number.to_string()));
        }
        if let Some(heap) = self.heap {
            text.push_str(&heap.text());
        }
        text.push_str(&repeat(&choose(self.file.text(), &self.constants), self.slots.len()));
        number_bindings(&text)
    }
}

/// The buffers that have experts' slots: as many as a kernel is bound to at a time.
fn arenas(variants: Variants, window: u32) -> String {
    if variants.arrays {
        return include_str!("../shaders/arenas_array.wgsl").to_owned();
    }
    let mut text = String::from(
        "\n// The current expert's arena among those that are bound.\nvar<private> arena: u32;\n",
    );
    for i in 0..window {
        text.push_str(&format!("@group(0) @binding(#) var<storage, read> arena{i}: array<u32>;\n"));
    }
    text.push_str("fn expert_word(word: u32) -> u32 {\n    switch arena {\n");
    for i in 1..window {
        text.push_str(&format!("        case {i}u: {{ return arena{i}[word]; }}\n"));
    }
    text.push_str("        default: { return arena0[word]; }\n    }\n}\n");
    text
}

/// Numbers the bindings, which are written `@binding(#)`, in their order.
fn number_bindings(text: &str) -> String {
    let mut parts = text.split("@binding(#)");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for (number, part) in parts.enumerate() {
        out.push_str(&format!("@binding({number}){part}"));
    }
    out
}

/// Drops the parts of a text for other constants: `//when NAME {` begins one for those that are not zero, `//unless NAME
/// {` one for zero, and `//}` ends both.
fn choose(text: &str, constants: &[(&'static str, u32)]) -> String {
    let is_set = |name: &str| {
        let constant = constants.iter().find(|(other, _)| *other == name);
        constant.unwrap_or_else(|| panic!("{name} is no constant of the kernel")).1 != 0
    };
    let mut out = String::with_capacity(text.len());
    let mut part = None;
    for line in text.lines() {
        let name = |prefix| line.strip_prefix(prefix)?.strip_suffix(" {");
        if let Some(name) = name("//when ") {
            part = Some(is_set(name));
        } else if let Some(name) = name("//unless ") {
            part = Some(!is_set(name));
        } else if line == "//}" && part.is_some() {
            part = None;
        } else if part != Some(false) {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// Repeats the marked parts of a text.
fn repeat(text: &str, slots: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut part: Option<String> = None;
    for line in text.lines() {
        match (line.trim(), &mut part) {
            ("//each {", none) => *none = Some(String::new()),
            ("//}", Some(_)) => {
                let part = part.take().expect("it has begun");
                (0..slots).for_each(|slot| out.push_str(&part.replace('$', &slot.to_string())));
            }
            (_, Some(part)) => {
                part.push_str(line);
                part.push('\n');
            }
            (_, None) => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out
}

/// A compiled kernel.
pub struct Kernel {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
    /// Its buffers, in order.
    pub slots: Vec<Slot>,
}

/// A buffer of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Whether the kernel only reads it.
    pub read_only: bool,
    /// Whether it is an array of buffers.
    pub array: bool,
}

/// Reads a kernel's buffers off its text.
pub fn slots_of(text: &str) -> Vec<Slot> {
    text.lines()
        .filter(|line| line.trim_start().starts_with("@group(0) @binding("))
        .map(|line| Slot {
            read_only: line.contains("<storage, read>"),
            array: line.contains("binding_array"),
        })
        .collect()
}

/// Buffers in an array: experts' slots are in at most this many allocations.
pub const ARRAY: u32 = 64;

/// The kernels that any model on a GPU has used.
#[derive(Default)]
pub struct Kernels(Mutex<Compiled>);

#[derive(Default)]
struct Compiled {
    numbers: HashMap<Name, usize>,
    kernels: Vec<Arc<Kernel>>,
}

impl Kernels {
    /// A kernel and its number. Compiles it on first use.
    ///
    /// # Errors
    /// If the driver cannot compile it.
    pub fn named(&self, gpu: &Gpu, name: &Name) -> Result<(usize, Arc<Kernel>)> {
        let mut all = self.lock();
        if let Some(&number) = all.numbers.get(name) {
            return Ok((number, Arc::clone(&all.kernels[number])));
        }
        let (number, kernel) = (all.kernels.len(), Arc::new(compile(gpu, name)?));
        all.kernels.push(Arc::clone(&kernel));
        all.numbers.insert(name.clone(), number);
        Ok((number, kernel))
    }

    /// The name of the kernel with this number.
    pub fn name(&self, number: usize) -> Name {
        let all = self.lock();
        let named = all.numbers.iter().find(|(_, other)| **other == number);
        named.expect("every kernel has a name").0.clone()
    }

    /// The kernel with this number.
    pub fn nth(&self, number: usize) -> Arc<Kernel> {
        Arc::clone(&self.lock().kernels[number])
    }

    fn lock(&self) -> MutexGuard<'_, Compiled> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn compile(gpu: &Gpu, name: &Name) -> Result<Kernel> {
    let text = name.text(gpu.variants, gpu.info.subgroup_min_size);
    let slots = slots_of(&text);
    let scope = gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
    let checks = wgpu::ShaderRuntimeChecks::unchecked();
    let source = wgpu::ShaderSource::Wgsl(text.as_str().into());
    // SAFETY: kernels check their bounds themselves, and their loops end.
    let module = unsafe {
        let description = wgpu::ShaderModuleDescriptor { label: Some(name.entry), source };
        gpu.device.create_shader_module_trusted(description, checks)
    };
    let entries: Vec<wgpu::BindGroupLayoutEntry> = slots
        .iter()
        .enumerate()
        .map(|(binding, slot)| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: slot.read_only },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: slot.array.then(|| std::num::NonZeroU32::new(ARRAY).expect("it is not zero")),
        })
        .collect();
    let layout = gpu.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: Some(name.entry),
        entries: &entries,
    });
    let pipeline_layout = gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(name.entry),
        bind_group_layouts: &[Some(&layout)],
        immediate_size: IMMEDIATES,
    });
    let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(name.entry),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some(name.entry),
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache: None,
    });
    match pollster::block_on(scope.pop()) {
        Some(error) => {
            let kinds: Vec<WeightKind> = name.slots.iter().map(|slot| slot.kind).collect();
            let message = format!("{} cannot compile {} for {kinds:?}: {error}", gpu.name(), name.entry);
            Err(Error::Backend(message))
        }
        None => Ok(Kernel { pipeline, layout, slots }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_parts_are_repeated_for_each_slot() {
        assert_eq!(repeat("a\n//each {\nb$;\n//}\nc", 2), "a\nb0;\nb1;\nc\n");
        assert_eq!(repeat("//each {\nb$;\n//}", 0), "");
    }

    #[test]
    fn parts_are_chosen_by_constants() {
        let text = "a\n//when X {\nb\n//}\n//unless X {\nc\n//}\n//each {\nd\n//}";
        assert_eq!(choose(text, &[("X", 2)]), "a\nb\n//each {\nd\n//}\n");
        assert_eq!(choose(text, &[("X", 0)]), "a\nc\n//each {\nd\n//}\n");
    }

    #[test]
    fn buffers_are_read_off_the_text() {
        let text = "@group(0) @binding(#) var<storage, read> a: binding_array<Words, 64>;\n\
                    @group(0) @binding(#) var<storage, read_write> b: array<f32>;";
        let text = number_bindings(text);
        assert!(
            text.contains("@binding(0) var<storage, read> a")
                && text.contains("@binding(1) var<storage, read_write>")
        );
        let first = Slot { read_only: true, array: true };
        assert_eq!(slots_of(&text), [first, Slot { read_only: false, array: false }]);
    }
}
