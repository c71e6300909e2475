//! A GPU that is open: what it can do, its memory, and its errors.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_engine::{Error, Result};
use wgpu::Features;

use crate::adopt;
use crate::find::{Api, Found};
use crate::profile::{HostClock, Profile};
use crate::shaders::{ARRAY, Kernels};
use crate::submissions::Commands;

/// What kernels may use. Tests turn parts off, so that the variants for GPUs without them are tested, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variants {
    /// Arrays of buffers, so that one kernel reaches all experts.
    pub arrays: bool,
    /// Operations between the threads of a subgroup.
    pub subgroups: bool,
    /// Computing with halves.
    pub halves: bool,
    /// Products of small matrices of halves, computed by subgroups of 32 threads.
    pub matrices: bool,
    /// Memory that the GPU shares with the processor. Without it, such a GPU is treated as a card.
    pub sharing: bool,
}

impl Variants {
    /// Everything that the GPU has.
    pub const ALL: Variants =
        Variants { arrays: true, subgroups: true, halves: true, matrices: true, sharing: true };

    /// No kernel uses anything that a GPU may lack.
    pub const PLAIN: Variants =
        Variants { arrays: false, subgroups: false, halves: false, matrices: false, sharing: true };
}

/// Features for arrays of buffers.
pub fn array_features() -> Features {
    Features::BUFFER_BINDING_ARRAY
        | Features::STORAGE_RESOURCE_BINDING_ARRAY
        | Features::SAMPLED_TEXTURE_AND_STORAGE_BUFFER_ARRAY_NON_UNIFORM_INDEXING
}

/// Whether subgroups of 32 threads multiply matrices of 16 by 16 halves, with sums of floats.
fn multiplies_matrices(adapter: &wgpu::Adapter) -> bool {
    use wgpu::CooperativeScalarType::{F16, F32};
    let info = adapter.get_info();
    adapter.features().contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
        && (info.subgroup_min_size, info.subgroup_max_size) == (32, 32)
        && adapter.cooperative_matrix_properties().iter().any(|shape| {
            (shape.m_size, shape.n_size, shape.k_size) == (16, 16, 16)
                && (shape.ab_type, shape.cr_type) == (F16, F32)
        })
}

/// Bytes of immediates: the arguments of a kernel.
pub const IMMEDIATES: u32 = 128;

/// An open GPU.
pub struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
    pub limits: wgpu::Limits,
    /// What kernels use: all that was allowed and that the GPU has.
    pub variants: Variants,
    /// Whether the GPU computes from the memory of the process.
    pub unified: bool,
    /// Memory that models may use.
    pub budget: u64,
    used: Mutex<Vec<(&'static str, u64)>>,
    /// How many buffers have been dropped. Whoever keeps handles of buffers drops them when this changes.
    dropped: AtomicU64,
    failure: Arc<Mutex<Option<Failure>>>,
    pub adopted: adopt::Adopted,
    pub kernels: Kernels,
    pub commands: Mutex<Commands>,
    pub counts: Counters,
    /// `None` while kernels are not timed.
    pub profile: Mutex<Option<Profile>>,
    pub clock: HostClock,
}

/// How much the GPU was given to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels recorded.
    pub dispatches: u64,
    /// Submissions.
    pub submits: u64,
    /// Times that the host waited for the GPU.
    pub waits: u64,
    /// Bytes of experts copied to the GPU.
    pub uploaded: u64,
}

/// Counts what the GPU is given to do.
#[derive(Default)]
pub struct Counters([AtomicU64; 4]);

impl Counters {
    fn add(&self, what: usize, count: u64) {
        self.0[what].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts kernels.
    pub fn add_dispatches(&self, count: u64) {
        self.add(0, count);
    }

    /// Counts a submission.
    pub fn add_submission(&self) {
        self.add(1, 1);
    }

    /// Counts a time that the host waited.
    pub fn add_wait(&self) {
        self.add(2, 1);
    }

    /// Counts bytes of experts that are copied to the GPU.
    pub fn add_upload(&self, bytes: u64) {
        self.add(3, bytes);
    }

    /// What has been counted so far.
    pub fn get(&self) -> Counts {
        let [dispatches, submits, waits, uploaded] = [0, 1, 2, 3].map(|i| self.0[i].load(Ordering::Relaxed));
        Counts { dispatches, submits, waits, uploaded }
    }
}

/// What the GPU reported.
#[derive(Clone)]
enum Failure {
    Error(String),
    Lost(String),
}

impl Gpu {
    /// Opens a GPU with this much of its memory; by default all that there is.
    ///
    /// # Errors
    /// If it lacks what every kernel needs, or cannot be opened.
    pub fn open(found: &Found, memory: Option<u64>, allowed: Variants) -> Result<Arc<Gpu>> {
        let has = found.adapter.features();
        if !has.contains(Features::IMMEDIATES) || found.adapter.limits().max_immediate_size < IMMEDIATES {
            let message = format!(
                "{} cannot pass {IMMEDIATES} bytes of arguments to a kernel; use Options::device = None",
                found.name()
            );
            return Err(Error::Unsupported(message));
        }
        let arrays = allowed.arrays && has.contains(array_features());
        let subgroups = allowed.subgroups && has.contains(Features::SUBGROUP);
        let halves = allowed.halves && has.contains(Features::SHADER_F16);
        let matrices = allowed.matrices && subgroups && halves && multiplies_matrices(&found.adapter);
        let mut wanted = Features::IMMEDIATES;
        wanted.set(array_features(), arrays);
        wanted.set(Features::TIMESTAMP_QUERY, has.contains(Features::TIMESTAMP_QUERY));
        wanted.set(Features::SUBGROUP, subgroups);
        wanted.set(Features::SHADER_F16, halves);
        wanted.set(Features::EXPERIMENTAL_COOPERATIVE_MATRIX, matrices);
        let limits = found.adapter.limits();
        let (device, queue) = adopt::open(&found.adapter, wanted, &limits)
            .map_err(|error| Error::Backend(format!("cannot open {}: {error}", found.name())))?;
        let failure = Arc::new(Mutex::new(None));
        let seen = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let mut failure = seen.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(Failure::Error(error.to_string()));
        }));
        let seen = Arc::clone(&failure);
        device.set_device_lost_callback(move |_, why| {
            *seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(Failure::Lost(why));
        });
        let unified = allowed.sharing && found.unified() && adopt::is_possible(&device);
        Ok(Arc::new(Gpu {
            unified,
            budget: memory.unwrap_or(u64::MAX).min(found.memory() / 10 * 9),
            info: found.adapter.get_info(),
            variants: Variants { arrays, subgroups, halves, matrices, sharing: unified },
            adopted: adopt::Adopted::default(),
            kernels: Kernels::default(),
            used: Mutex::default(),
            dropped: AtomicU64::new(0),
            commands: Mutex::default(),
            counts: Counters::default(),
            profile: Mutex::default(),
            clock: HostClock::default(),
            device,
            queue,
            limits,
            failure,
        }))
    }

    /// Its name and interface, for messages.
    pub fn name(&self) -> String {
        format!("{} ({})", self.info.name, Api::of(&self.info))
    }

    /// Allocates memory for a purpose.
    ///
    /// # Errors
    /// If the budget or the GPU's memory is exhausted, or a buffer cannot be so large.
    pub fn allocate(self: &Arc<Self>, bytes: u64, purpose: &'static str) -> Result<Memory> {
        let bytes = bytes.max(16).next_multiple_of(16);
        let most = self.limits.max_buffer_size.min(self.limits.max_storage_buffer_binding_size);
        if bytes > most {
            return Err(Error::Unsupported(format!(
                "{}: {purpose} needs a buffer of {} bytes, but its buffers have at most {most}; use Options::device = \
                 None",
                self.name(),
                bytes
            )));
        }
        self.count(bytes, purpose)?;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(purpose),
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let memory = Memory { gpu: Arc::clone(self), buffer, bytes, purpose };
        match pollster::block_on(scope.pop()) {
            Some(error) => {
                let message =
                    format!("{} has not {bytes} bytes of memory left for {purpose}: {error}", self.name());
                Err(Error::Backend(message))
            }
            None => Ok(memory),
        }
    }

    /// Counts memory for a purpose.
    fn count(&self, bytes: u64, purpose: &'static str) -> Result<()> {
        let mut used = self.lock_used();
        let total: u64 = used.iter().map(|(_, bytes)| bytes).sum();
        // The process's own budget counts unified memory.
        if !self.unified && total + bytes > self.budget {
            return Err(Error::Budget {
                need: total + bytes,
                have: self.budget,
                what: format!("on the GPU: {purpose}"),
                remedy: "raise the device's memory limit, ask for a shorter context with Options::context, or use \
                         Options::device = None"
                    .into(),
            });
        }
        match used.iter_mut().find(|(what, _)| *what == purpose) {
            Some((_, sum)) => *sum += bytes,
            None => used.push((purpose, bytes)),
        }
        Ok(())
    }

    /// Bytes in use, by purpose.
    pub fn used(&self) -> Vec<(&'static str, u64)> {
        self.lock_used().clone()
    }

    fn lock_used(&self) -> MutexGuard<'_, Vec<(&'static str, u64)>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many buffers have been dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Counts a dropped buffer.
    pub fn note_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// The most bytes of a buffer that has experts' slots.
    pub fn largest_arena(&self) -> usize {
        /// Kernels count bytes with 32 bits.
        const MOST: u64 = 1 << 31;
        /// Room for the rest of the first and last page.
        const PAGES: u64 = 1 << 16;
        let limits = &self.limits;
        let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(MOST);
        (most - PAGES) as usize
    }

    /// How many arenas of experts a kernel is bound to at a time.
    pub fn window(&self) -> usize {
        /// The most arenas without arrays of buffers: each is a branch.
        const MOST: usize = 8;
        /// Other buffers of these kernels.
        const OTHERS: usize = 12;
        match self.variants.arrays {
            true => ARRAY as usize,
            false => (self.limits.max_storage_buffers_per_shader_stage as usize - OTHERS).clamp(1, MOST),
        }
    }

    /// What the GPU has reported since this was last called.
    ///
    /// # Errors
    /// If it failed. A lost GPU stays lost.
    pub fn check(&self) -> Result<()> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        match failure.clone() {
            None => Ok(()),
            Some(Failure::Error(message)) => {
                *failure = None;
                Err(Error::Backend(format!("{} cannot compute: {message}", self.name())))
            }
            Some(Failure::Lost(why)) => Err(Error::DeviceLost(format!("{} is lost: {why}", self.name()))),
        }
    }
}

/// A buffer of the GPU.
pub struct Memory {
    gpu: Arc<Gpu>,
    buffer: wgpu::Buffer,
    bytes: u64,
    purpose: &'static str,
}

impl Memory {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of it.
    pub fn whole(&self) -> Span {
        Span { buffer: self.buffer.clone(), start: 0, bytes: self.bytes }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.gpu.note_dropped();
        let mut used = self.gpu.lock_used();
        if let Some((_, sum)) = used.iter_mut().find(|(what, _)| *what == self.purpose) {
            *sum -= self.bytes;
        }
    }
}

/// A part of a buffer.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Span {
    pub buffer: wgpu::Buffer,
    pub start: u64,
    pub bytes: u64,
}

impl Span {
    /// A part of the part.
    pub fn part(&self, start: u64, bytes: u64) -> Span {
        assert!(start + bytes <= self.bytes, "{start}+{bytes} of {}", self.bytes);
        Span { buffer: self.buffer.clone(), start: self.start + start, bytes }
    }

    /// The part as a kernel's buffer.
    pub fn binding(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.buffer, offset: self.start, size: NonZeroU64::new(self.bytes) }
    }

    /// A part that starts where bindings may start and includes this one, and how many bytes before this one it starts.
    pub fn aligned(&self, alignment: u64) -> (Span, u64) {
        let lead = self.start % alignment;
        // Kernels read whole words.
        let bytes = (self.bytes + lead).next_multiple_of(4).min(self.buffer.size() - (self.start - lead));
        (Span { buffer: self.buffer.clone(), start: self.start - lead, bytes }, lead)
    }
}
