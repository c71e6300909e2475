//! Records operations first and starts them together. A sequence that was recorded before is started as a CUDA graph.
//!
//! What differs from token to token (tokens, positions, pages) is never a kernel argument. It is put into the *step
//! parameters*, which are copied to the same place before every start. So batches of the same shape record the same
//! sequence.

use std::sync::Arc;

use bytemuck::{Pod, cast_slice};
use cudarc::driver::{DriverError, result, sys};
use forebay_engine::{Error, Result};

use crate::compile::Kernel;
use crate::driver::{Address, Event, Gpu, Memory, Pinned, Stream, failed};
use crate::profile;

/// Bytes for the step parameters of one start.
const STEP_PARAMS: usize = 16 << 20;

/// If this environment variable is set, each kernel starts only when its predecessor has ended, for comparisons and
/// debugging.
const APART: &str = "FOREBAY_GPU_APART";

/// The most bytes of step parameters that a kernel fetches.
const FETCHED: usize = 512 << 10;

/// The most graphs that are kept.
const GRAPHS: usize = 64;

/// The launch configuration of a kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    /// The number of blocks.
    pub grid: [usize; 3],
    /// Threads per block.
    pub threads: usize,
    /// Bytes of dynamic shared memory per block.
    pub shared: usize,
}

impl Shape {
    /// Blocks of this many threads.
    pub fn new(grid: [usize; 3], threads: usize) -> Shape {
        Shape { grid, threads, shared: 0 }
    }

    /// Enough blocks of 256 threads for one thread per item.
    pub fn each(count: usize) -> Shape {
        Shape::new([count.div_ceil(256), 1, 1], 256)
    }

    /// Sets the shared memory.
    pub fn shared(self, shared: usize) -> Shape {
        Shape { shared, ..self }
    }
}

/// The arguments of a kernel: the fields of one struct, with C's layout.
#[derive(Clone, Default)]
pub struct Args(Vec<u8>);

impl Args {
    /// No arguments.
    pub fn new() -> Args {
        Args(Vec::with_capacity(640))
    }

    fn put(mut self, bytes: &[u8]) -> Args {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Adds a pointer; zero is null.
    pub fn at(self, address: Address) -> Args {
        self.put(&address.to_le_bytes())
    }

    /// Adds a `u64`.
    pub fn long(self, number: usize) -> Args {
        self.put(&(number as u64).to_le_bytes())
    }

    /// Adds a `u32`.
    pub fn int(self, number: usize) -> Args {
        self.put(&u32::try_from(number).expect("numbers of kernels fit").to_le_bytes())
    }

    /// Adds a truth value as a `u32`.
    pub fn flag(self, truth: bool) -> Args {
        self.int(truth.into())
    }

    /// Adds a `float`.
    pub fn float(self, number: f32) -> Args {
        self.put(&number.to_le_bytes())
    }
}

/// Records operations and starts them.
pub struct Recorder {
    gpu: Arc<Gpu>,
    /// The recorded sequence: for each start the kernel, its launch configuration, and its arguments.
    words: Vec<u64>,
    graphs: Vec<Graph>,
    /// Counts starts.
    clock: u64,
    params: StepParams,
    /// The kernel that fetches step parameters, once it is compiled.
    fetch: Option<Kernel>,
    /// Whether the next start waits for all earlier work: for copies, or for step parameters that are being fetched.
    waits: bool,
    /// Whether a kernel starts while its predecessor ends, so that its preparations overlap with it.
    overlap: bool,
}

/// A recorded sequence, and the graph that it became when it was repeated.
struct Graph {
    words: Vec<u64>,
    started: Option<sys::CUgraphExec>,
    used: u64,
}

// SAFETY: the handle is the driver's, which any thread may use.
unsafe impl Send for Graph {}

/// Two buffers for step parameters. One holds those of the current batch, for all its starts, while those of the next
/// batch are written to the other.
struct StepParams {
    here: Pinned,
    there: Memory,
    copied: [Event; 2],
    half: usize,
    used: usize,
    /// How many of them have been sent.
    sent: usize,
    /// Whether the next batch uses the other buffer.
    turns: bool,
    /// Counts changes of buffers and batches.
    turn: u64,
}

impl StepParams {
    /// Marks all parameters as sent.
    fn are_sent(&mut self) -> Result<()> {
        self.sent = self.used;
        self.copied[self.half].set(Stream::Compute)
    }

    /// Changes to the other buffer, once its last copy has ended.
    fn turn(&mut self) -> Result<()> {
        self.half = 1 - self.half;
        (self.used, self.sent, self.turns) = (0, 0, false);
        self.turn += 1;
        self.copied[self.half].wait()
    }
}

impl Recorder {
    /// A recorder without operations.
    ///
    /// # Errors
    /// If there is no memory for step parameters.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Recorder> {
        let params = StepParams {
            here: Pinned::new(gpu, 2 * STEP_PARAMS)?,
            there: gpu.allocate(2 * STEP_PARAMS, "batch parameters")?,
            copied: [Event::new(gpu)?, Event::new(gpu)?],
            half: 0,
            used: 0,
            sent: 0,
            turns: false,
            turn: 0,
        };
        let overlap = gpu.overlaps() && std::env::var_os(APART).is_none();
        Ok(Recorder {
            gpu: gpu.clone(),
            words: Vec::new(),
            graphs: Vec::new(),
            clock: 0,
            params,
            fetch: None,
            waits: false,
            overlap,
        })
    }

    /// Sets the kernel that fetches step parameters while experts are being uploaded.
    pub fn fetch_by(&mut self, fetch: Kernel) {
        self.fetch = Some(fetch);
    }

    /// Drops what was recorded and not started; a new batch begins.
    pub fn clear(&mut self) {
        self.words.clear();
        self.waits = false;
        self.params.used = self.params.sent;
        self.params.turns = self.params.sent > 0;
        self.params.turn += 1;
    }

    /// Whether the buffer may be too small for more step parameters, so that what was recorded should be started.
    pub fn has_many_params(&self) -> bool {
        self.params.used > STEP_PARAMS / 2
    }

    /// Identifies the current step parameters: within a turn, they stay where they are.
    pub fn turn(&self) -> u64 {
        self.params.turn
    }

    /// Adds step parameters. Returns their address for kernels.
    ///
    /// # Errors
    /// If there is no space for them.
    pub fn params<T: Pod>(&mut self, params: &[T]) -> Result<Address> {
        let bytes: &[u8] = cast_slice(params);
        if self.params.turns {
            self.params.turn()?;
        }
        let start = self.params.used.next_multiple_of(16);
        if start + bytes.len() > STEP_PARAMS {
            return Err(Error::Backend(
                "the batch is too large for the GPU's parameter buffer; use shorter conversations or fewer at once".into(),
            ));
        }
        let at = self.params.half * STEP_PARAMS + start;
        self.params.here.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
        self.params.used = start + bytes.len();
        Ok(self.params.there.address() + at as u64)
    }

    /// Records the start of a kernel.
    pub fn record(&mut self, kernel: Kernel, shape: Shape, args: Args) {
        put(&mut self.words, kernel, shape, args);
    }

    /// Starts what was recorded.
    ///
    /// # Errors
    /// If the GPU reports an error.
    pub fn submit(&mut self) -> Result<()> {
        if self.words.is_empty() {
            return Ok(());
        }
        if self.waits {
            return self.submit_once();
        }
        let copied = self.copy_params()?;
        self.send(|recorder, words| recorder.start(words, copied))
    }

    /// Starts what was recorded while experts are being uploaded. The sequence will hardly be repeated, so it does not
    /// become a graph.
    ///
    /// # Errors
    /// If the GPU reports an error.
    pub fn submit_once(&mut self) -> Result<()> {
        if self.words.is_empty() {
            return Ok(());
        }
        self.send_params()?;
        self.send(|recorder, words| {
            let waits = std::mem::take(&mut recorder.waits);
            launch(words, recorder.gpu.stream(), recorder.overlap, waits)
        })
    }

    /// Makes the next start wait for copies: its first kernel does not start early, because what it waits for is not a
    /// kernel.
    pub fn waits_for_copies(&mut self) {
        self.waits = true;
    }

    /// Sends step parameters before the recorded operations start. A kernel fetches them, unless they are many, because
    /// a copy would have to wait for uploads of experts.
    ///
    /// # Errors
    /// If the GPU reports an error.
    pub fn send_params(&mut self) -> Result<()> {
        let StepParams { here, there, half, used, sent, .. } = &self.params;
        let first = sent.next_multiple_of(16);
        let bytes = used.saturating_sub(first).next_multiple_of(16);
        let Some(fetch) = self.fetch.filter(|_| bytes <= FETCHED) else {
            self.waits |= self.copy_params()?;
            return Ok(());
        };
        if bytes > 0 {
            let at = (half * STEP_PARAMS + first) as u64;
            let args = Args::new().at(here.address() + at).at(there.address() + at).int(bytes / 8);
            let mut words = Vec::with_capacity(8);
            put(&mut words, fetch, Shape::each(bytes / 8), args);
            self.gpu.enter()?;
            launch(&words, self.gpu.stream(), self.overlap, false).map_err(|e| failed("compute", e))?;
            // Kernels may read step parameters before they wait for their predecessor.
            self.waits = true;
            self.params.are_sent()?;
        }
        Ok(())
    }

    /// Copies step parameters. Returns whether there were any.
    fn copy_params(&mut self) -> Result<bool> {
        let StepParams { here, there, half, used, sent, .. } = &mut self.params;
        if *used > *sent {
            let at = *half * STEP_PARAMS;
            let (to, bytes) = (there.address() + (at + *sent) as u64, &here.bytes()[at + *sent..at + *used]);
            self.gpu.enter()?;
            // SAFETY: the bytes are not written to before the event set below has passed.
            unsafe { result::memcpy_htod_async(to, bytes, self.gpu.stream()) }
                .map_err(|error| failed("receive data", error))?;
            self.params.are_sent()?;
            return Ok(true);
        }
        Ok(false)
    }

    fn send(&mut self, start: impl Fn(&mut Recorder, &[u64]) -> Result<(), DriverError>) -> Result<()> {
        self.gpu.enter()?;
        let words = std::mem::take(&mut self.words);
        let started = start(self, &words);
        self.words = words;
        self.words.clear();
        started.map_err(|error| failed("compute", error))?;
        // A batch with many starts has many parameters.
        if self.has_many_params() { self.params.turn() } else { Ok(()) }
    }

    /// Starts a sequence: kernel by kernel the first time, and as a graph from then on. If it `waits`, its first kernel
    /// starts when all earlier work has ended.
    fn start(&mut self, words: &[u64], waits: bool) -> Result<(), DriverError> {
        self.clock += 1;
        let stream = self.gpu.stream();
        if profile::is_on() {
            return profile::time(&parts(words), stream, |one| launch(one, stream, false, false));
        }
        let Some(known) = self.graphs.iter_mut().find(|graph| graph.words == words) else {
            if self.graphs.len() == GRAPHS {
                let oldest = (0..GRAPHS).min_by_key(|&i| self.graphs[i].used).expect("there are some");
                self.graphs.swap_remove(oldest).destroy();
            }
            self.graphs.push(Graph { words: words.to_vec(), started: None, used: self.clock });
            return launch(words, stream, self.overlap, waits);
        };
        known.used = self.clock;
        let graph = match known.started {
            Some(graph) => graph,
            None => {
                let graph = capture(words, self.gpu.recording(), self.overlap)?;
                known.started = Some(graph);
                graph
            }
        };
        // SAFETY: the graph was made for this context, and all memory it names is the backend's or the states'.
        unsafe { result::graph::launch(graph, stream) }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.gpu.wait().is_ok() {
            self.graphs.drain(..).for_each(Graph::destroy);
        }
    }
}

impl Graph {
    fn destroy(self) {
        if let Some(graph) = self.started {
            // SAFETY: it was made once; a graph that still runs is kept by the driver until it has ended.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}

/// Captures a sequence as a graph.
fn capture(words: &[u64], stream: sys::CUstream, overlap: bool) -> Result<sys::CUgraphExec, DriverError> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is the GPU's, and used for this alone.
    unsafe {
        result::stream::begin_capture(stream, mode)?;
        let launched = launch(words, stream, overlap, false);
        let graph = result::stream::end_capture(stream);
        let graph = graph?;
        let ready =
            launched.and_then(|()| result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)));
        result::graph::destroy(graph)?;
        ready
    }
}

/// Splits a sequence into kernels and their words.
fn parts(mut words: &[u64]) -> Vec<(sys::CUfunction, &[u64])> {
    let mut parts = Vec::new();
    while let [kernel, _, _, shared_args, ..] = words {
        let (one, rest) = words.split_at(4 + (shared_args >> 32) as usize);
        parts.push((*kernel as sys::CUfunction, one));
        words = rest;
    }
    parts
}

/// Adds the start of a kernel to a sequence.
fn put(words: &mut Vec<u64>, kernel: Kernel, shape: Shape, args: Args) {
    let Shape { grid: [x, y, z], threads, shared } = shape;
    if x == 0 || y == 0 || z == 0 {
        return;
    }
    assert!(y < 1 << 16 && z < 1 << 16, "a grid of {x} by {y} by {z}");
    let mut bytes = args.0;
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let two = |low: usize, high: usize| low as u64 | (high as u64) << 32;
    words.extend([kernel.0 as u64, two(x, y), two(z, threads), two(shared, bytes.len() / 8)]);
    words.extend(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight"))));
}

/// Starts the kernels of a sequence one by one. If it `waits`, the first one starts when all earlier work has ended.
fn launch(
    mut words: &[u64],
    stream: sys::CUstream,
    overlap: bool,
    mut waits: bool,
) -> Result<(), DriverError> {
    let low = |word: u64| word as u32;
    let high = |word: u64| (word >> 32) as u32;
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    attribute.value.programmaticStreamSerializationAllowed = 1;
    while let [kernel, xy, z_threads, shared_args, rest @ ..] = words {
        let (args, rest) = rest.split_at(high(*shared_args) as usize);
        let mut params = [args.as_ptr().cast_mut().cast()];
        let config = sys::CUlaunchConfig {
            gridDimX: low(*xy),
            gridDimY: high(*xy),
            gridDimZ: low(*z_threads),
            blockDimX: high(*z_threads),
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: low(*shared_args),
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: (overlap && !std::mem::take(&mut waits)).into(),
        };
        let kernel = *kernel as sys::CUfunction;
        // SAFETY: the kernel is one of the backend's, and takes these arguments by value as one structure. The memory
        // they name is the backend's or the states', and is given back after everything on the stream.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel, params.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()?;
        words = rest;
    }
    Ok(())
}
