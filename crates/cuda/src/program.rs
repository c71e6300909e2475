//! Operations are recorded first and started together: as a graph, if the same was recorded before.
//!
//! What differs from token to token (tokens, positions, pages) is never an argument of a kernel. It is put among the
//! *step parameters*, which are copied to the same place before every start, so that a batch of the same shape records the same.

use std::sync::Arc;

use bytemuck::{Pod, cast_slice};
use cudarc::driver::{DriverError, result, sys};
use forebay_engine::{Error, Result};

use crate::compile::Kernel;
use crate::driver::{Address, Event, Gpu, Memory, Pinned, Stream, failed};
use crate::profile;

/// Step parameters of one start.
const STEP_PARAMS: usize = 16 << 20;

/// Where this is set, kernels start when the one before has ended, on every GPU. To compare, and to look for errors.
const APART: &str = "FOREBAY_GPU_APART";

/// The most bytes of step parameters that a kernel fetches.
const FETCHED: usize = 512 << 10;

/// The most graphs that are kept.
const GRAPHS: usize = 64;

/// How a kernel is started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of shared memory that a block asks for.
    pub shared: usize,
}

impl Shape {
    /// Blocks of so many threads.
    pub fn new(grid: [usize; 3], threads: usize) -> Shape {
        Shape { grid, threads, shared: 0 }
    }

    /// Enough blocks of 256 threads to have one for each of `count`.
    pub fn each(count: usize) -> Shape {
        Shape::new([count.div_ceil(256), 1, 1], 256)
    }

    /// With so many bytes of shared memory.
    pub fn shared(self, shared: usize) -> Shape {
        Shape { shared, ..self }
    }
}

/// The arguments of a kernel: the fields of one structure, laid out as C does.
#[derive(Clone, Default)]
pub struct Args(Vec<u8>);

impl Args {
    /// None yet.
    pub fn new() -> Args {
        Args(Vec::with_capacity(640))
    }

    fn put(mut self, bytes: &[u8]) -> Args {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    /// A pointer; zero is none.
    pub fn at(self, address: Address) -> Args {
        self.put(&address.to_le_bytes())
    }

    /// A `u64`.
    pub fn long(self, number: usize) -> Args {
        self.put(&(number as u64).to_le_bytes())
    }

    /// A `u32`.
    pub fn int(self, number: usize) -> Args {
        self.put(&u32::try_from(number).expect("numbers of kernels fit").to_le_bytes())
    }

    /// A `u32` that is a truth.
    pub fn flag(self, truth: bool) -> Args {
        self.int(truth.into())
    }

    /// A `float`.
    pub fn float(self, number: f32) -> Args {
        self.put(&number.to_le_bytes())
    }
}

/// Records operations and starts them.
pub struct Recorder {
    gpu: Arc<Gpu>,
    /// What was recorded: for each start the kernel, its shape, and its arguments.
    words: Vec<u64>,
    graphs: Vec<Graph>,
    /// Counts starts.
    clock: u64,
    params: StepParams,
    /// The kernel that fetches step parameters, once it is there.
    fetch: Option<Kernel>,
    /// Whether what is started next waits for all before it: for copies, or for step parameters that are being fetched.
    waits: bool,
    /// Whether a kernel starts while the one before it ends: what it does before it reads anything is then done meanwhile.
    overlap: bool,
}

/// A record, and what it became when it came again.
struct Graph {
    words: Vec<u64>,
    started: Option<sys::CUgraphExec>,
    used: u64,
}

// SAFETY: the handle is the driver's, which any thread may use.
unsafe impl Send for Graph {}

/// Two places for step parameters: a batch's are in one, and stay there for all that it starts, while those of the next are written to the
/// other.
struct StepParams {
    here: Pinned,
    there: Memory,
    copied: [Event; 2],
    half: usize,
    used: usize,
    /// How many of them have been sent.
    sent: usize,
    /// Whether the next batch's go to the other place.
    turns: bool,
    /// Counts batches and changes of the place.
    turn: u64,
}

impl StepParams {
    /// All of them are on their way.
    fn are_sent(&mut self) -> Result<()> {
        self.sent = self.used;
        self.copied[self.half].set(Stream::Compute)
    }

    /// Goes on in the other place, when what was there last has been copied.
    fn turn(&mut self) -> Result<()> {
        self.half = 1 - self.half;
        (self.used, self.sent, self.turns) = (0, 0, false);
        self.turn += 1;
        self.copied[self.half].wait()
    }
}

impl Recorder {
    /// Nothing recorded.
    ///
    /// # Errors
    /// If there is no memory for step parameters.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Recorder> {
        let params = StepParams {
            here: Pinned::new(gpu, 2 * STEP_PARAMS)?,
            there: gpu.allocate(2 * STEP_PARAMS, "the lists of a batch")?,
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

    /// From now on this kernel fetches step parameters while experts are on their way.
    pub fn fetch_by(&mut self, fetch: Kernel) {
        self.fetch = Some(fetch);
    }

    /// Forgets what was recorded and not started; a new batch begins.
    pub fn clear(&mut self) {
        self.words.clear();
        self.waits = false;
        self.params.used = self.params.sent;
        self.params.turns = self.params.sent > 0;
        self.params.turn += 1;
    }

    /// Whether there are so many step parameters that what was recorded should be started: the next ones may have no room.
    pub fn has_many_params(&self) -> bool {
        self.params.used > STEP_PARAMS / 2
    }

    /// Step parameters of the same turn are where they were.
    pub fn turn(&self) -> u64 {
        self.params.turn
    }

    /// Puts step parameters where kernels will find them.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn params<T: Pod>(&mut self, params: &[T]) -> Result<Address> {
        let bytes: &[u8] = cast_slice(params);
        if self.params.turns {
            self.params.turn()?;
        }
        let start = self.params.used.next_multiple_of(16);
        if start + bytes.len() > STEP_PARAMS {
            return Err(Error::Backend(
                "the batch has more pages than the GPU's lists hold; use shorter ones".into(),
            ));
        }
        let at = self.params.half * STEP_PARAMS + start;
        self.params.here.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
        self.params.used = start + bytes.len();
        Ok(self.params.there.address() + at as u64)
    }

    /// Records a start of a kernel.
    pub fn record(&mut self, kernel: Kernel, shape: Shape, args: Args) {
        put(&mut self.words, kernel, shape, args);
    }

    /// Starts what was recorded.
    ///
    /// # Errors
    /// If the GPU refuses.
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

    /// Starts what was recorded, which will hardly come again in this form, while experts are on their way.
    ///
    /// # Errors
    /// If the GPU refuses.
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

    /// What is started next waits for copies: its first kernel does not start early, for those it waits for are no kernels.
    pub fn waits_for_copies(&mut self) {
        self.waits = true;
    }

    /// Sends what was put among the step parameters before what is recorded is started. Not by a copy, unless they are many: that would have
    /// to wait for the copies of experts.
    ///
    /// # Errors
    /// If the GPU refuses.
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
            // Kernels may read step parameters before they wait for the one before them.
            self.waits = true;
            self.params.are_sent()?;
        }
        Ok(())
    }

    /// Says whether there was something to copy.
    fn copy_params(&mut self) -> Result<bool> {
        let StepParams { here, there, half, used, sent, .. } = &mut self.params;
        if *used > *sent {
            let at = *half * STEP_PARAMS;
            let (to, bytes) = (there.address() + (at + *sent) as u64, &here.bytes()[at + *sent..at + *used]);
            self.gpu.enter()?;
            // SAFETY: the bytes are not written to before the event set below has passed.
            unsafe { result::memcpy_htod_async(to, bytes, self.gpu.stream()) }
                .map_err(|error| failed("take data", error))?;
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
        // A batch that starts often has many.
        if self.has_many_params() { self.params.turn() } else { Ok(()) }
    }

    /// Starts a record: one by one when it comes first, the first one when all before it has ended if it `waits`, and as a graph from
    /// then on.
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

/// Makes a graph of a record.
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

/// The kernels of a record, and the part of it that is about each.
fn parts(mut words: &[u64]) -> Vec<(sys::CUfunction, &[u64])> {
    let mut parts = Vec::new();
    while let [kernel, _, _, shared_args, ..] = words {
        let (one, rest) = words.split_at(4 + (shared_args >> 32) as usize);
        parts.push((*kernel as sys::CUfunction, one));
        words = rest;
    }
    parts
}

/// Adds the start of a kernel to a record.
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

/// Starts the kernels of a record one by one, the first one when all before it has ended, if it `waits`.
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
