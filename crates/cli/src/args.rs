//! Flags that several commands share.

use std::io::{IsTerminal, read_to_string, stdin};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use forebay_devices::Gpu;
use forebay_engine::internals::experts::Device;
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::internals::format::Metadata;
use forebay_engine::internals::generate::sampler::{SamplingOverrides, SamplingParams};
use forebay_engine::plan::ExpertMemory;
use forebay_engine::{Engine, Error, Options, Precision, TokenId};

use crate::device::{self, DeviceArgs};
use crate::errors::{self, in_flags};
use crate::progress::Progress;
use crate::pull;
use crate::values::{self, at_least_one};

/// The model of a command that has a default.
#[derive(Args)]
pub struct ModelArgs {
    /// GGUF file (for a split model, any part), safetensors folder, or download, as OWNER/NAME:QUANT [default: the demo
    /// model]
    // The place is said because a default from a file of settings would change the order.
    #[arg(index = 1)]
    model: Option<PathBuf>,
    /// The same as MODEL
    #[arg(short = 'm', long = "model", value_name = "MODEL", help_heading = "Model")]
    model_flag: Option<PathBuf>,
}

impl ModelArgs {
    /// The model that was named.
    ///
    /// # Errors
    /// If two were.
    pub fn get(&self) -> Result<Option<&Path>> {
        one_model(self.model.as_deref(), self.model_flag.as_deref())
    }

    /// The path of the model that was named, or of the demo model.
    pub fn locate(&self) -> Result<PathBuf> {
        pull::locate_or_demo(self.get()?)
    }
}

/// The model of a command that needs one.
#[derive(Args)]
pub struct RequiredModelArgs {
    /// GGUF file (for a split model, any part), safetensors folder, or download, as OWNER/NAME:QUANT
    #[arg(required_unless_present = "model_flag")]
    model: Option<PathBuf>,
    /// The same as MODEL
    #[arg(short = 'm', long = "model", value_name = "MODEL", help_heading = "Model")]
    model_flag: Option<PathBuf>,
}

impl RequiredModelArgs {
    /// The model that was named.
    pub fn get(&self) -> Result<&Path> {
        let model = one_model(self.model.as_deref(), self.model_flag.as_deref())?;
        model.ok_or_else(|| errors::usage("no model was given"))
    }

    /// The path of the model that was named.
    pub fn locate(&self) -> Result<PathBuf> {
        pull::locate(self.get()?)
    }
}

fn one_model<'a>(place: Option<&'a Path>, flag: Option<&'a Path>) -> Result<Option<&'a Path>> {
    match (place, flag) {
        (Some(place), Some(flag)) if place != flag => Err(errors::usage(format!(
            "two models were given: {} and, after --model, {}; a prompt goes after -p",
            place.display(),
            flag.display()
        ))),
        _ => Ok(place.or(flag)),
    }
}

/// How a model is loaded.
#[derive(Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct LoadArgs {
    /// Context length in tokens [default: the model's maximum; memory for 8192 is reserved]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N", value_parser = at_least_one)]
    ctx: Option<usize>,
    #[command(flatten)]
    compute: ComputeArgs,
}

impl LoadArgs {
    /// Loads the model, with a progress bar if it takes longer than a moment.
    pub fn load(&self, path: &Path) -> Result<Engine> {
        self.compute.load(path, self.ctx)
    }

    /// As [`load`](Self::load), for the processor, after the GPU that had it was lost.
    ///
    /// # Errors
    /// If it cannot be loaded, or the command line says that only the GPU may compute.
    pub fn load_after(&self, lost: &str, path: &Path) -> Result<Engine> {
        let error = Error::DeviceLost(lost.to_owned());
        if !self.compute.device.may_fall_back(&error) {
            return Err(error.into());
        }
        eprintln!("The GPU was lost; loading the model on the CPU: {}", in_flags(lost));
        self.compute
            .open(path, self.ctx, None)
            .context("the GPU was lost, and the model cannot be loaded on the CPU")
    }

    /// The same, for a server with so many requests open at once.
    pub fn with_open_requests(&self, open_requests: usize) -> LoadArgs {
        LoadArgs { compute: ComputeArgs { open_requests, ..self.compute.clone() }, ..self.clone() }
    }

    /// The same, with an observer of loading.
    pub fn with_observer(&self, observer: LoadObserver) -> LoadArgs {
        let observer = Some(observer);
        LoadArgs { compute: ComputeArgs { observer, ..self.compute.clone() }, ..self.clone() }
    }

    /// How the model is to be loaded.
    pub fn options(&self) -> Options {
        self.compute.options(self.ctx)
    }

    /// The GPU that would compute, if one would.
    pub fn device(&self) -> Result<Option<Gpu>> {
        self.compute.device()
    }
}

/// How a model computes, and with how much memory.
#[derive(Clone, Args)]
#[command(next_help_heading = "Memory")]
pub struct ComputeArgs {
    /// Memory budget of the whole process, such as 8G; experts that do not fit are read from the drive when they are needed
    /// [default: free memory, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = values::memory)]
    memory: Option<u64>,
    /// Share of the budget for experts, such as 4G, or 30% of all experts [default: what the other parts leave]
    #[arg(long, value_name = "SIZE|PERCENT", value_parser = values::expert_memory)]
    expert_memory: Option<ExpertMemory>,
    #[command(flatten)]
    device: DeviceArgs,
    /// How experts are read from the drive
    #[arg(long, value_name = "METHOD", default_value_t, value_parser = values::io(), help_heading = STREAMING)]
    io: IoMethod,
    /// Eviction policy: which experts leave memory when others need the space
    #[arg(long, value_name = "NAME", default_value = PolicyKind::default().name(), value_parser = values::policy(),
        help_heading = STREAMING)]
    policy: PolicyKind,
    /// Read experts that the next layer will probably need while the drive is idle, and upload them to the GPU while PCIe is
    /// idle
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = values::on_off(), hide_possible_values = true,
        action = clap::ArgAction::Set, help_heading = STREAMING)]
    prefetch: bool,
    /// Remember across runs which experts are used most, and load those first
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = values::on_off(), hide_possible_values = true,
        action = clap::ArgAction::Set, help_heading = STREAMING)]
    heat: bool,
    /// Compute threads [default: one per processor]
    #[arg(short, long, value_name = "N", value_parser = at_least_one, help_heading = COMPUTING)]
    threads: Option<usize>,
    /// Compute with dequantised weights in f32; slower, for comparison
    #[arg(long, help_heading = COMPUTING)]
    exact: bool,
    /// Requests that may be open at once, for whose connections and tasks memory is set aside.
    #[arg(skip)]
    open_requests: usize,
    /// Told how many bytes are loaded, and of how many.
    #[arg(skip)]
    observer: Option<LoadObserver>,
}

/// Told how many bytes are loaded, and of how many.
pub type LoadObserver = Arc<dyn Fn(u64, u64) + Send + Sync>;
const STREAMING: &str = "Reading experts";
const COMPUTING: &str = "Computing";

/// What an open request takes besides what is counted for it: its connection's buffers, its task, and the allocator's gaps.
const OPEN_REQUEST: u64 = 128 << 10;

impl ComputeArgs {
    /// Loads the model for conversations of `context` tokens, with a progress bar if it takes longer than a moment.
    pub fn load(&self, path: &Path, context: Option<usize>) -> Result<Engine> {
        Ok(self.load_on(path, context)?.0)
    }

    /// As [`load`](Self::load), and tells the GPU that has it, if one does.
    pub fn load_on(&self, path: &Path, context: Option<usize>) -> Result<(Engine, Option<Gpu>)> {
        let why = |text: String| eprintln!("{}", in_flags(&text));
        let open = |device| self.open(path, context, device);
        let (engine, gpu) = self.device.choice().load(self.device.vram, why, open)?;
        if gpu.is_some() {
            device::note(&format!("Running on {}.", engine.backend_name()));
        } else if self.device.cpu_experts {
            device::note("--cpu-experts has no effect: all experts are computed on the CPU.");
        }
        Ok((engine, gpu))
    }

    fn open(
        &self,
        path: &Path,
        context: Option<usize>,
        device: Option<Arc<dyn Device>>,
    ) -> forebay_engine::Result<Engine> {
        let bar = Progress::loading();
        let (draw, observer) = (bar.callback(), self.observer.clone());
        let told: LoadObserver = Arc::new(move |done, total| {
            draw(done, total);
            if let Some(observer) = &observer {
                observer(done, total);
            }
        });
        Engine::open(path, &self.options(context).progress(Some(told)).device(device))
    }

    /// The GPU that would compute, if one would.
    pub fn device(&self) -> Result<Option<Gpu>> {
        self.device.open()
    }

    /// How the model is to be loaded for conversations of `context` tokens.
    pub fn options(&self, context: Option<usize>) -> Options {
        Options::default()
            .context(context)
            .threads(self.threads)
            .precision(self.precision())
            .memory(self.memory)
            .expert_memory(self.expert_memory)
            .io(self.io)
            .policy(self.policy)
            .prefetch(self.prefetch)
            .cpu_experts(self.device.cpu_experts)
            .heat(if self.heat { forebay_hub::cache_folder("heat") } else { None })
            .caller(self.open_requests as u64 * OPEN_REQUEST)
    }

    /// How products with quantised weights are computed.
    pub fn precision(&self) -> Precision {
        if self.exact { Precision::Exact } else { Precision::Fast }
    }
}

/// How tokens are chosen. What is not given comes from the model's file, if it says.
#[derive(Args)]
#[command(next_help_heading = "Sampling (values that the model file recommends replace the defaults)")]
pub struct SamplingArgs {
    /// Temperature; 0 always picks the most likely token [default: 0.8]
    #[arg(long, visible_alias = "temperature", value_name = "T")]
    temp: Option<f32>,
    /// Sample from the K most likely tokens; 0 means all [default: 40]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the most likely tokens that together have probability P [default: 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Sample from tokens at least P times as likely as the most likely one [default: 0.05]
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Divide the logits of recent tokens by X; 1 means off [default: 1]
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f32>,
    /// Subtract X from the logits of tokens that the answer already contains [default: 0]
    #[arg(long, value_name = "X")]
    presence_penalty: Option<f32>,
    /// Subtract X from a token's logit for each time the answer contains it [default: 0]
    #[arg(long, value_name = "X")]
    frequency_penalty: Option<f32>,
    /// Number of recent tokens that the penalties consider [default: 64]
    #[arg(long, visible_alias = "repeat-last-n", value_name = "N")]
    penalty_last_n: Option<usize>,
    /// Add BIAS to the logit of token ID (repeatable)
    #[arg(long, value_name = "ID=BIAS", allow_hyphen_values = true)]
    logit_bias: Vec<LogitBias>,
    /// Random seed: the same seed gives the same text [default: random]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// Finds values that no model takes, before a model is loaded.
    pub fn check(&self) -> Result<()> {
        self.refusal().map_or(Ok(()), |error| Err(errors::usage(error)))
    }

    /// Why no model takes these values.
    pub fn refusal(&self) -> Option<forebay_engine::Error> {
        self.overrides().resolve(&Metadata::default(), Path::new("")).err()
    }

    /// The parameters in effect for this model.
    pub fn resolve(&self, engine: &Engine) -> Result<SamplingParams> {
        let file = engine.file();
        Ok(self.overrides().resolve(&file.metadata, file.path())?)
    }

    /// What was set.
    pub fn overrides(&self) -> SamplingOverrides {
        let bias: Vec<_> = self.logit_bias.iter().map(|b| (b.token, b.bias)).collect();
        SamplingOverrides {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: self.penalty_last_n,
            logit_bias: (!bias.is_empty()).then_some(bias),
            seed: self.seed,
        }
    }
}

#[derive(Clone, Copy)]
struct LogitBias {
    token: TokenId,
    bias: f32,
}

impl FromStr for LogitBias {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<LogitBias> {
        let (token, bias) = s.split_once('=').ok_or_else(|| anyhow!("expected ID=BIAS, such as 15=-2.5"))?;
        Ok(LogitBias {
            token: TokenId(token.trim().parse().context("the token is not a number")?),
            bias: bias.trim().parse().context("the bias is not a number")?,
        })
    }
}

/// A text from a flag, a file or standard input.
#[derive(Args)]
#[group(multiple = false)]
#[command(next_help_heading = "Text")]
pub struct TextArgs {
    /// Text
    #[arg(short = 'p', long, visible_alias = "prompt", value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,
    /// File with the text [default: standard input]
    #[arg(short, long, visible_alias = "prompt-file", value_name = "FILE")]
    file: Option<PathBuf>,
}

impl TextArgs {
    /// The text, wherever it is.
    pub fn read(&self) -> Result<String> {
        match (&self.text, &self.file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(path)) => read_text(path),
            (None, None) => read_stdin(),
        }
    }
}

/// The prompt of `run`.
#[derive(Args)]
#[group(skip)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Prompt, the same as -p
    #[arg(index = 2, value_name = "PROMPT", help_heading = None, conflicts_with_all = ["prompt", "prompt_file"])]
    positional_prompt: Option<String>,
    /// Prompt; piped text follows it after a blank line [default: a chat on a terminal, otherwise standard input]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(short = 'f', long, visible_alias = "file", value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
}

impl PromptArgs {
    /// The prompt, followed by what is piped in; `None` if there is no prompt, and then nothing is read.
    pub fn read(&self) -> Result<Option<String>> {
        let prompt = match (self.positional_prompt.as_ref().or(self.prompt.as_ref()), &self.prompt_file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(path)) => read_text(path)?,
            (None, None) => return Ok(None),
        };
        let piped = if stdin().is_terminal() { String::new() } else { read_pipe()? };
        if piped.trim().is_empty() {
            return Ok(Some(prompt));
        }
        Ok(Some(format!("{}\n\n{piped}", prompt.trim_end_matches(['\r', '\n']))))
    }
}

/// All of standard input. A program that starts this one may leave a pipe open and never write to it, so that a wait is
/// explained.
fn read_pipe() -> Result<String> {
    let (end, ended) = channel::<()>();
    std::thread::spawn(move || {
        if ended.recv_timeout(PIPE_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            eprintln!("Waiting for the end of standard input; without input, add `< /dev/null`.");
        }
    });
    let text = read_to_string(stdin()).context("cannot read standard input");
    drop(end);
    text
}

/// How long a pipe may stay silent before the user is told.
const PIPE_PATIENCE: Duration = Duration::from_secs(2);

/// A file of text.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", path.display()))
}

/// All of standard input.
pub fn read_stdin() -> Result<String> {
    if stdin().is_terminal() {
        eprintln!("Type the text, then Ctrl-D on a line of its own.");
    }
    read_to_string(stdin()).context("cannot read standard input")
}
