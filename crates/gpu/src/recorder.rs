//! Records kernels and copies, and submits them.
//!
//! Everything since the last submission is one command buffer. Parameters of a batch, such as positions and page
//! tables, go through one buffer, which is written before the commands that read it.

use std::collections::HashMap;
use std::sync::Arc;

use bytemuck::{Pod, cast_slice};
use forebay_engine::Result;
use smallvec::SmallVec;

use crate::device::{Gpu, IMMEDIATES, Memory, Span};
use crate::shaders::{ARRAY, Kernel, Kernels, Name};

/// The arguments of a kernel: its struct `Args`, whose fields are all 32 bits long.
#[derive(Clone, Default)]
pub struct Args(SmallVec<[u32; 32]>);

impl Args {
    /// No arguments.
    pub fn new() -> Args {
        Args::default()
    }

    /// Adds a `u32`.
    pub fn int(mut self, number: usize) -> Args {
        self.0.push(u32::try_from(number).expect("numbers of kernels fit"));
        self
    }

    /// Adds an `f32`.
    pub fn float(mut self, number: f32) -> Args {
        self.0.push(number.to_bits());
        self
    }

    /// Adds a truth value as a `u32`.
    pub fn flag(self, truth: bool) -> Args {
        self.int(truth.into())
    }
}

/// What a kernel's slot is bound to.
#[derive(Clone)]
pub enum Bound {
    /// A part of a buffer.
    Span(Span),
    /// Several buffers, for an array of them.
    Array(Vec<Span>),
    /// Nothing: the kernel does not use it with these arguments.
    None,
}

impl From<Span> for Bound {
    fn from(span: Span) -> Bound {
        Bound::Span(span)
    }
}

impl From<Option<Span>> for Bound {
    fn from(span: Option<Span>) -> Bound {
        span.map_or(Bound::None, Bound::Span)
    }
}

/// How much has been recorded and submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels started.
    pub dispatches: u64,
    /// Command buffers submitted.
    pub submits: u64,
    /// Times that the host waited for the GPU.
    pub waits: u64,
    /// Bytes of experts copied to the GPU.
    pub uploaded: u64,
}

/// The bytes of parameters between two submissions, at first.
const PARAMS: u64 = 1 << 20;

type Key = (Name, SmallVec<[Span; 8]>);

/// A kernel that is recorded before whatever follows, unless that takes its work over.
struct Deferred {
    name: Name,
    grid: [usize; 3],
    args: Args,
    bound: Vec<Bound>,
}

/// Records operations.
pub struct Recorder {
    gpu: Arc<Gpu>,
    pub kernels: Kernels,
    deferred: Option<Deferred>,
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    groups: HashMap<Key, wgpu::BindGroup>,
    /// How many buffers had been dropped when the groups were made.
    groups_of: u64,
    params: Memory,
    /// The parameters of the batch, and how many of their bytes have been sent.
    written: Vec<u8>,
    sent: usize,
    /// What slots that a kernel does not use are bound to: for reading, and for writing.
    nothing: [Memory; 2],
    readback: Option<wgpu::Buffer>,
    pub counts: Counts,
}

impl Recorder {
    /// A recorder without operations.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Recorder> {
        Ok(Recorder {
            params: gpu.allocate(PARAMS, "batch parameters")?,
            nothing: [gpu.allocate(256, "scratch")?, gpu.allocate(256, "scratch")?],
            gpu: Arc::clone(gpu),
            kernels: Kernels::default(),
            deferred: None,
            pass: None,
            encoder: None,
            groups: HashMap::new(),
            groups_of: 0,
            written: Vec::new(),
            sent: 0,
            readback: None,
            counts: Counts::default(),
        })
    }

    /// Begins a batch: drops what was recorded and not submitted, and all parameters.
    pub fn begin(&mut self) {
        self.deferred = None;
        self.pass = None;
        self.encoder = None;
        self.written.clear();
        self.sent = 0;
    }

    /// Adds parameters. They stay until the next batch begins. Returns where kernels find them.
    ///
    /// # Errors
    /// If there is not enough memory for them.
    pub fn params<T: Pod>(&mut self, params: &[T]) -> Result<Span> {
        let bytes: &[u8] = cast_slice(params);
        let alignment = self.gpu.limits.min_storage_buffer_offset_alignment as usize;
        let mut start = self.written.len().next_multiple_of(alignment.max(16));
        if (start + bytes.len()) as u64 > self.params.bytes() {
            // What was recorded keeps the full buffer.
            self.send_params();
            let wanted = (2 * self.params.bytes()).max((bytes.len() as u64).next_power_of_two());
            self.params = self.gpu.allocate(wanted, "batch parameters")?;
            (start, self.sent) = (0, 0);
            self.written.clear();
        }
        self.written.resize(start, 0);
        self.written.extend_from_slice(bytes);
        self.written.resize(self.written.len().next_multiple_of(4), 0);
        Ok(self.params.whole().part(start as u64, (bytes.len() as u64).next_multiple_of(4).max(4)))
    }

    /// Writes new parameters before the next submission.
    fn send_params(&mut self) {
        if self.written.len() > self.sent {
            let (buffer, new) = (self.params.whole().buffer, &self.written[self.sent..]);
            self.gpu.queue.write_buffer(&buffer, self.sent as u64, new);
            self.sent = self.written.len();
        }
    }

    /// Records the start of a kernel with a grid of workgroups.
    ///
    /// # Errors
    /// If it cannot be compiled.
    pub fn record(&mut self, name: &Name, grid: [usize; 3], args: &Args, bound: &[Bound]) -> Result<()> {
        self.record_deferred();
        self.record_now(name, grid, args, bound)
    }

    /// Records the start of a kernel once anything else is recorded or submitted, unless
    /// [`drop_deferred`](Self::drop_deferred) is called first.
    ///
    /// # Errors
    /// If it cannot be compiled.
    pub fn defer(&mut self, name: Name, grid: [usize; 3], args: Args, bound: Vec<Bound>) -> Result<()> {
        self.record_deferred();
        self.kernels.get(&self.gpu, &name)?;
        self.deferred = Some(Deferred { name, grid, args, bound });
        Ok(())
    }

    /// Whether a kernel is deferred.
    pub fn has_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    /// Drops the deferred kernel, because the next one does its work.
    pub fn drop_deferred(&mut self) {
        self.deferred = None;
    }

    fn record_deferred(&mut self) {
        if let Some(Deferred { name, grid, args, bound }) = self.deferred.take() {
            self.record_now(&name, grid, &args, &bound).expect("it has been compiled");
        }
    }

    fn record_now(&mut self, name: &Name, grid: [usize; 3], args: &Args, bound: &[Bound]) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let most = self.gpu.limits.max_compute_workgroups_per_dimension as usize;
        assert!(grid.iter().all(|&n| n <= most), "a grid of {grid:?} for {}", name.entry);
        let kernel = self.kernels.get(&self.gpu, name)?;
        assert_eq!(kernel.slots.len(), bound.len(), "the buffers of {}", name.entry);
        if self.groups_of != self.gpu.dropped() {
            self.groups.clear();
            self.groups_of = self.gpu.dropped();
        }
        let mut key: Key = (name.clone(), SmallVec::new());
        for (slot, bound) in kernel.slots.iter().zip(bound) {
            let nothing = || self.nothing[usize::from(!slot.read_only)].whole();
            match bound {
                Bound::Span(span) => key.1.push(span.clone()),
                Bound::None if !slot.array => key.1.push(nothing()),
                Bound::None => key.1.extend((0..ARRAY).map(|_| nothing())),
                Bound::Array(spans) => {
                    assert!(slot.array && spans.len() <= ARRAY as usize);
                    key.1.extend(spans.iter().cloned());
                    key.1.extend((spans.len()..ARRAY as usize).map(|_| nothing()));
                }
            }
        }
        let group = match self.groups.get(&key) {
            Some(group) => group,
            None => {
                let group = make_group(&self.gpu, kernel, &key.1);
                self.groups.entry(key).or_insert(group)
            }
        };
        let encoder = match &mut self.encoder {
            Some(encoder) => encoder,
            none => none.insert(self.gpu.device.create_command_encoder(&Default::default())),
        };
        let pass = match &mut self.pass {
            Some(pass) => pass,
            none => none.insert(encoder.begin_compute_pass(&Default::default()).forget_lifetime()),
        };
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, group, &[]);
        assert!(args.0.len() * 4 <= IMMEDIATES as usize);
        if !args.0.is_empty() {
            pass.set_immediates(0, cast_slice(&args.0));
        }
        let [x, y, z] = grid.map(|n| n as u32);
        pass.dispatch_workgroups(x, y, z);
        self.counts.dispatches += 1;
        Ok(())
    }

    /// Records a copy.
    pub fn copy(&mut self, from: &Span, to: &Span) {
        self.record_deferred();
        self.pass = None;
        let encoder = match &mut self.encoder {
            Some(encoder) => encoder,
            none => none.insert(self.gpu.device.create_command_encoder(&Default::default())),
        };
        encoder.copy_buffer_to_buffer(&from.buffer, from.start, &to.buffer, to.start, from.bytes);
    }

    /// Submits what was recorded. Returns the submission, if there was anything.
    ///
    /// # Errors
    /// If the GPU failed before.
    pub fn submit(&mut self) -> Result<Option<wgpu::SubmissionIndex>> {
        self.record_deferred();
        self.pass = None;
        let Some(encoder) = self.encoder.take() else { return Ok(None) };
        self.send_params();
        let submission = self.gpu.queue.submit([encoder.finish()]);
        self.counts.submits += 1;
        self.gpu.check()?;
        Ok(Some(submission))
    }

    /// Copies a part of a buffer to RAM, after everything recorded.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn read(&mut self, from: &Span, out: &mut [u8]) -> Result<()> {
        assert!(out.len() as u64 <= from.bytes);
        let bytes = (out.len() as u64).next_multiple_of(4);
        if self.readback.as_ref().is_none_or(|buffer| buffer.size() < bytes) {
            self.readback = Some(self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("results"),
                size: bytes.next_power_of_two(),
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }));
        }
        let buffer = self.readback.clone().expect("it was just made");
        let from = Span { bytes, ..from.clone() };
        self.copy(&from, &Span { buffer: buffer.clone(), start: 0, bytes });
        let submission = self.submit()?;
        buffer.slice(..bytes).map_async(wgpu::MapMode::Read, |_| {});
        self.counts.waits += 1;
        self.gpu.wait(submission)?;
        {
            let mapped = buffer.slice(..bytes).get_mapped_range();
            let mapped = mapped.map_err(|error| {
                forebay_engine::Error::Backend(format!("{} cannot be read from: {error}", self.gpu.name()))
            })?;
            out.copy_from_slice(&mapped[..out.len()]);
        }
        buffer.unmap();
        Ok(())
    }

    /// Writes to a buffer, after everything recorded.
    ///
    /// # Errors
    /// If the GPU failed before.
    pub fn write(&mut self, to: &Span, bytes: &[u8]) -> Result<()> {
        self.submit()?;
        self.gpu.queue.write_buffer(&to.buffer, to.start, bytes);
        Ok(())
    }
}

fn make_group(gpu: &Gpu, kernel: &Kernel, spans: &[Span]) -> wgpu::BindGroup {
    let all: Vec<wgpu::BufferBinding<'_>> = spans.iter().map(Span::binding).collect();
    let mut at = 0;
    let mut entries = Vec::with_capacity(kernel.slots.len());
    for (number, slot) in kernel.slots.iter().enumerate() {
        let count = if slot.array { ARRAY as usize } else { 1 };
        let some = &all[at..at + count];
        at += count;
        let resource = match slot.array {
            true => wgpu::BindingResource::BufferArray(some),
            false => wgpu::BindingResource::Buffer(some[0].clone()),
        };
        entries.push(wgpu::BindGroupEntry { binding: number as u32, resource });
    }
    gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &kernel.layout,
        entries: &entries,
    })
}
