//! Records kernels and copies, and submits them.
//!
//! Parameters of a batch, such as positions and page tables, go through one buffer, which is written before the commands
//! that read it. So the commands of one token are usually those of the last one. Then the command buffers for the next
//! token are made while the GPU still computes this one.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, cast_slice};
use forebay_engine::{Error, Result};
use smallvec::SmallVec;

use crate::device::{Gpu, IMMEDIATES, Memory, Span};
use crate::grids;
use crate::profile::{self, Stopwatch, Work};
use crate::shaders::{ARRAY, Kernel, Name};
use crate::submissions::{Kept, Submission};

/// The arguments of a kernel: its struct `Args`, whose fields are all 32 bits long.
#[derive(Clone, Default, PartialEq)]
pub struct Args(Vec<u32>);

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
    Array(Arc<Spans>),
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

/// The bytes of a batch's parameters, at first.
const PARAMS: u64 = 1 << 20;

/// A recorded operation.
#[derive(PartialEq)]
enum Command {
    Kernel { number: usize, grid: [u32; 3], args: Args, resources: Resources },
    Copy { origin: Span, to: Span },
}

/// Operations that were closed together.
#[derive(Default)]
struct Part {
    commands: Vec<Command>,
    /// Whether they are those of the submission before.
    repeats: bool,
    /// The command buffer for the next time.
    prepared: Option<wgpu::CommandBuffer>,
}

/// The most bind groups that are kept. Streamed experts bind other lists for every token, so there is no end of them.
const MOST_GROUPS: usize = 4096;

/// How many parts are submitted together: usually the layers and the logits.
const MOST_PARTS: usize = 2;

/// Buffers for an array of them, of which some may be missing. They are compared by their number, because there are many.
pub struct Spans {
    number: u64,
    spans: Vec<Option<Span>>,
}

impl Spans {
    /// At most [`ARRAY`] buffers.
    pub fn new(spans: Vec<Option<Span>>) -> Arc<Spans> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        assert!(spans.len() <= ARRAY as usize);
        Arc::new(Spans { number: LAST.fetch_add(1, Ordering::Relaxed), spans })
    }

    /// The buffer with this number in the array, if there is one.
    pub fn nth(&self, number: usize) -> Option<&Span> {
        self.spans.get(number)?.as_ref()
    }
}

/// What a slot of a recorded kernel is bound to.
#[derive(Clone)]
enum Resource {
    Span(Span),
    Array(Arc<Spans>),
}

impl PartialEq for Resource {
    fn eq(&self, other: &Resource) -> bool {
        match (self, other) {
            (Resource::Span(a), Resource::Span(b)) => a == b,
            (Resource::Array(a), Resource::Array(b)) => a.number == b.number,
            _ => false,
        }
    }
}

impl Eq for Resource {}

impl Hash for Resource {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        match self {
            Resource::Span(span) => span.hash(hasher),
            Resource::Array(array) => array.number.hash(hasher),
        }
    }
}

/// What a kernel is bound to.
type Resources = Arc<[Resource]>;

/// Records operations.
pub struct Recorder {
    gpu: Arc<Gpu>,
    commands: Vec<Command>,
    /// What they use.
    kept: Vec<Kept>,
    /// What was closed since the last submission, in order, and what the one before had beyond that.
    parts: Vec<Part>,
    /// How many parts were closed since the last submission.
    closed: usize,
    groups: HashMap<(usize, Resources), wgpu::BindGroup>,
    /// How many buffers had been dropped when the groups were made.
    groups_of: u64,
    params: Memory,
    /// The parameters of the batch, and how many of their bytes have been sent.
    written: Vec<u8>,
    sent: usize,
    /// What slots that a kernel does not use are bound to: for reading, and for writing.
    nothing: [Memory; 2],
    readback: Option<wgpu::Buffer>,
    /// The grids of the IQ types.
    grids: Memory,
}

impl Recorder {
    /// A recorder without operations.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Recorder> {
        let table = grids::table();
        let grids = gpu.allocate(4 * table.len() as u64, "scratch")?;
        gpu.queue.write_buffer(&grids.whole().buffer, 0, cast_slice(&table));
        Ok(Recorder {
            params: gpu.allocate(PARAMS, "batch parameters")?,
            nothing: [gpu.allocate(256, "scratch")?, gpu.allocate(256, "scratch")?],
            gpu: Arc::clone(gpu),
            commands: Vec::new(),
            kept: Vec::new(),
            parts: Vec::new(),
            closed: 0,
            groups: HashMap::new(),
            groups_of: 0,
            written: Vec::new(),
            sent: 0,
            readback: None,
            grids,
        })
    }

    /// Begins a batch: drops what was recorded and not closed. What was closed may still be submitted with this batch.
    pub fn begin(&mut self) {
        self.commands.clear();
        self.kept.clear();
        if self.closed >= MOST_PARTS {
            self.gpu.submit_closed();
            self.closed = 0;
        }
        if !self.gpu.has_closed() {
            self.closed = 0;
        }
        // What is not submitted reads its parameters later.
        if self.closed == 0 {
            self.written.clear();
            self.sent = 0;
        }
    }

    /// Adds parameters. They stay until all that was closed is submitted. Returns where kernels find them.
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
        if grid.contains(&0) {
            return Ok(());
        }
        let most = self.gpu.limits.max_compute_workgroups_per_dimension as usize;
        assert!(grid.iter().all(|&n| n <= most), "a grid of {grid:?} for {}", name.entry);
        let (number, kernel) = self.gpu.kernels.named(&self.gpu, name)?;
        let slots = &kernel.slots;
        let grids = name.has_grids().then(|| Bound::Span(self.grids.whole()));
        let bound: SmallVec<[&Bound; 16]> = grids.iter().chain(bound).collect();
        assert_eq!(slots.len(), bound.len(), "the buffers of {}", name.entry);
        let mut resources = Vec::with_capacity(bound.len());
        for (slot, bound) in slots.iter().zip(bound) {
            resources.push(match bound {
                Bound::Span(span) => Resource::Span(span.clone()),
                Bound::Array(spans) => Resource::Array(Arc::clone(spans)),
                Bound::None => Resource::Span(self.nothing[usize::from(!slot.read_only)].whole()),
            });
            assert_eq!(slot.array, matches!(bound, Bound::Array(_)), "an array of {}", name.entry);
        }
        assert!(args.0.len() * 4 <= IMMEDIATES as usize);
        let grid = grid.map(|n| n as u32);
        let resources = resources.into();
        self.commands.push(Command::Kernel { number, grid, args: args.clone(), resources });
        Ok(())
    }

    /// Keeps something until what is recorded has ended.
    pub fn keep(&mut self, kept: Kept) {
        self.kept.push(kept);
    }

    /// Records a copy.
    pub fn copy(&mut self, origin: &Span, to: &Span) {
        self.commands.push(Command::Copy { origin: origin.clone(), to: to.clone() });
    }

    /// Makes a command buffer of what was recorded, to be submitted with whatever is submitted next.
    pub fn close(&mut self) {
        if self.commands.is_empty() {
            return;
        }
        self.send_params();
        let commands = std::mem::take(&mut self.commands);
        let kernels = commands.iter().filter(|command| matches!(command, Command::Kernel { .. }));
        self.gpu.counts.add_dispatches(kernels.count() as u64);
        if self.closed == self.parts.len() {
            self.parts.push(Part::default());
        }
        let part = &mut self.parts[self.closed];
        let prepared = part.prepared.take();
        // Kernels are timed in command buffers of their own.
        part.repeats = commands == part.commands && !profile::is_on(&self.gpu);
        let buffer = match prepared {
            Some(buffer) if part.repeats => buffer,
            _ => self.encode(&commands),
        };
        self.parts[self.closed].commands = commands;
        self.closed += 1;
        self.gpu.submit_later(buffer, std::mem::take(&mut self.kept));
    }

    /// Submits what was recorded.
    ///
    /// # Errors
    /// If the GPU failed before.
    pub fn submit(&mut self) -> Result<Option<Submission>> {
        self.close();
        self.parts.truncate(self.closed);
        self.closed = 0;
        self.gpu.submit()
    }

    /// Makes command buffers for the next time of what was submitted last, where that was a repetition. Called while the
    /// GPU computes.
    fn prepare(&mut self) {
        for number in 0..self.parts.len() {
            let part = &mut self.parts[number];
            if part.repeats && part.prepared.is_none() {
                let commands = std::mem::take(&mut part.commands);
                let buffer = self.encode(&commands);
                self.parts[number] = Part { commands, repeats: true, prepared: Some(buffer) };
            }
        }
    }

    fn encode(&mut self, commands: &[Command]) -> wgpu::CommandBuffer {
        let gpu = Arc::clone(&self.gpu);
        gpu.clock.time(Work::Encoding, || self.encode_all(commands))
    }

    fn encode_all(&mut self, commands: &[Command]) -> wgpu::CommandBuffer {
        let mut stopwatch = profile::is_on(&self.gpu).then(Stopwatch::default);
        if self.groups_of != self.gpu.dropped() || self.groups.len() > MOST_GROUPS {
            self.groups.clear();
            self.groups_of = self.gpu.dropped();
        }
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        let mut commands = commands.iter().peekable();
        while let Some(command) = commands.peek() {
            if let Command::Copy { origin, to } = command {
                encoder.copy_buffer_to_buffer(
                    &origin.buffer,
                    origin.start,
                    &to.buffer,
                    to.start,
                    origin.bytes,
                );
                commands.next();
                continue;
            }
            let mut pass = match (&mut stopwatch, command) {
                (Some(stopwatch), Command::Kernel { number, .. }) => {
                    stopwatch.pass(&self.gpu, &mut encoder, &self.gpu.kernels.name(*number))
                }
                _ => encoder.begin_compute_pass(&Default::default()),
            };
            while let Some(Command::Kernel { number, grid: [x, y, z], args, resources }) =
                commands.next_if(|command| matches!(command, Command::Kernel { .. }))
            {
                let kernel = self.gpu.kernels.nth(*number);
                let group = self
                    .groups
                    .entry((*number, Arc::clone(resources)))
                    .or_insert_with(|| make_group(&self.gpu, &kernel, resources, &self.nothing[0]));
                pass.set_pipeline(&kernel.pipeline);
                pass.set_bind_group(0, &*group, &[]);
                if !args.0.is_empty() {
                    pass.set_immediates(0, cast_slice(&args.0));
                }
                pass.dispatch_workgroups(*x, *y, *z);
                if stopwatch.is_some() {
                    break;
                }
            }
        }
        if let Some(stopwatch) = stopwatch {
            stopwatch.finish(&self.gpu, &mut encoder);
        }
        encoder.finish()
    }

    /// Copies a part of a buffer to RAM, after everything recorded.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn read(&mut self, origin: &Span, out: &mut [u8]) -> Result<()> {
        assert!(out.len() as u64 <= origin.bytes);
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
        let origin = Span { bytes, ..origin.clone() };
        self.copy(&origin, &Span { buffer: buffer.clone(), start: 0, bytes });
        let submission = self.submit()?;
        buffer.slice(..bytes).map_async(wgpu::MapMode::Read, |_| {});
        self.prepare();
        self.gpu.wait(submission.as_ref())?;
        {
            let mapped = buffer.slice(..bytes).get_mapped_range();
            let mapped = mapped
                .map_err(|error| Error::Backend(format!("{} cannot be read: {error}", self.gpu.name())))?;
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

fn make_group(gpu: &Gpu, kernel: &Kernel, resources: &[Resource], nothing: &Memory) -> wgpu::BindGroup {
    let nothing = nothing.whole();
    let all: Vec<Vec<wgpu::BufferBinding<'_>>> =
        resources.iter().map(|resource| bindings(resource, &nothing)).collect();
    let mut entries = Vec::with_capacity(all.len());
    for (number, (slot, bindings)) in kernel.slots.iter().zip(&all).enumerate() {
        let resource = match slot.array {
            true => wgpu::BindingResource::BufferArray(bindings),
            false => wgpu::BindingResource::Buffer(bindings[0].clone()),
        };
        entries.push(wgpu::BindGroupEntry { binding: number as u32, resource });
    }
    let layout = &kernel.layout;
    gpu.device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries })
}

/// The buffers that a slot is bound to. `nothing` is in the rest of an array.
fn bindings<'a>(resource: &'a Resource, nothing: &'a Span) -> Vec<wgpu::BufferBinding<'a>> {
    match resource {
        Resource::Span(span) => vec![span.binding()],
        Resource::Array(array) => {
            (0..ARRAY as usize).map(|number| array.nth(number).unwrap_or(nothing).binding()).collect()
        }
    }
}
