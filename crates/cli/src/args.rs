//! Flags that several commands share.

use std::io::{IsTerminal, read_to_string, stdin};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use forebay_cuda::Cuda;
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

/// How a model is loaded.
#[derive(Clone, Args)]
pub struct LoadArgs {
    /// Tokens a conversation may have [default: the model's limit, with memory set aside for 8192]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
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
        self.compute.open(path, self.ctx, None).context("the GPU was lost, and the processor cannot go on")
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
    pub fn device(&self) -> Result<Option<Cuda>> {
        self.compute.device()
    }
}

/// How a model computes, and with how much memory.
#[derive(Clone, Args)]
pub struct ComputeArgs {
    /// Memory budget, such as 8G: experts that do not fit are streamed. More than the machine has is refused [default: what is
    /// free, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// What experts may use of it, such as 4G or 30% of them [default: all that is left]
    #[arg(long, value_name = "SIZE|PERCENT", value_parser = expert_memory)]
    expert_memory: Option<ExpertMemory>,
    /// How experts are read: auto, uring, pool, or mmap for comparison
    #[arg(long, value_name = "METHOD", default_value_t, value_parser = IoMethod::from_str)]
    io: IoMethod,
    /// Which experts leave when room is needed
    #[arg(long, value_name = "NAME", default_value = PolicyKind::default().name(), value_parser = policy)]
    policy: PolicyKind,
    /// Read experts that a token's next layer will probably ask for while the drive is idle, and send them to a GPU while PCIe is
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = on_off, action = clap::ArgAction::Set)]
    prefetch: bool,
    /// Remember from run to run which experts are used most, and start with them
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = on_off, action = clap::ArgAction::Set)]
    heat: bool,
    /// Threads that compute [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    threads: Option<usize>,
    /// Compute with dequantised weights, in f32: slower, for comparison
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Requests that may be open at once, for whose connections and tasks memory is set aside.
    #[arg(skip)]
    open_requests: usize,
    /// Told how many bytes are loaded, and of how many.
    #[arg(skip)]
    observer: Option<LoadObserver>,
}

/// Told how many bytes are loaded, and of how many.
pub type LoadObserver = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What an open request takes besides what is counted for it: its connection's buffers, its task, and the allocator's gaps.
const OPEN_REQUEST: u64 = 128 << 10;

impl ComputeArgs {
    /// Loads the model for conversations of `context` tokens, with a progress bar if it takes longer than a moment.
    pub fn load(&self, path: &Path, context: Option<usize>) -> Result<Engine> {
        Ok(self.load_on(path, context)?.0)
    }

    /// As [`load`](Self::load), and tells the GPU that has it, if one does.
    pub fn load_on(&self, path: &Path, context: Option<usize>) -> Result<(Engine, Option<Arc<Cuda>>)> {
        let open = |device| self.open(path, context, device);
        let Some(gpu) = self.device.open()?.map(Arc::new) else {
            if self.device.cpu_experts {
                device::note("--cpu-experts has no effect: all experts are computed on the CPU.");
            }
            return Ok((open(None)?, None));
        };
        match open(Some(gpu.clone())) {
            Err(error) if self.device.may_fall_back(&error) => {
                eprintln!("Running on the CPU instead of {}: {}", gpu.name(), in_flags(&error.to_string()));
                Ok((open(None)?, None))
            }
            other => {
                let engine = other?;
                device::note(&format!("Running on {}.", engine.backend_name()));
                Ok((engine, Some(gpu)))
            }
        }
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
    pub fn device(&self) -> Result<Option<Cuda>> {
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
            .heat(if self.heat { cache_folder("heat") } else { None })
            .caller(self.open_requests as u64 * OPEN_REQUEST)
    }

    /// How products with quantised weights are computed.
    pub fn precision(&self) -> Precision {
        if self.exact { Precision::Exact } else { Precision::Fast }
    }
}

/// How tokens are chosen. What is not given comes from the model's file, if it says.
#[derive(Args)]
#[command(next_help_heading = "Sampling (the defaults are for files that recommend nothing)")]
pub struct SamplingArgs {
    /// Randomness; 0 always takes the likeliest token [default: 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Choose among the K likeliest tokens; 0 for all [default: 40]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have probability P [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Choose among tokens at least P times as likely as the likeliest [default: 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Divide the logits of tokens that have occurred; 1 is off [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Lower the logits of tokens that the answer holds [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Lower the logits of tokens by how often the answer holds them [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// How many tokens back the penalties look [default: 64]
    #[arg(long, value_name = "N")]
    penalty_last_n: Option<usize>,
    /// Add to the logit of a token, as ID=BIAS (may be given several times)
    #[arg(long, value_name = "ID=BIAS", allow_hyphen_values = true)]
    logit_bias: Vec<LogitBias>,
    /// Where the random numbers start: the same seed gives the same text
    #[arg(long, value_name = "N")]
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
pub struct TextArgs {
    /// The text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,
    /// A file with the text [default: standard input]
    #[arg(long, value_name = "FILE")]
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

/// Where something is remembered from run to run; nowhere, if there is no home.
pub fn cache_folder(what: &str) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Some(cache.or_else(|| set("LOCALAPPDATA"))?.join("forebay").join(what))
}

/// Reads a number of bytes for clap: `8G`, `1.5GiB`, `512M`, `4096`.
pub fn size(s: &str) -> Result<u64> {
    let text = s.trim().to_ascii_uppercase();
    let text = text.strip_suffix("IB").or_else(|| text.strip_suffix('B')).unwrap_or(&text);
    let units = [('K', 1u64 << 10), ('M', 1 << 20), ('G', 1 << 30), ('T', 1 << 40)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(letter, unit)| Some((text.strip_suffix(letter)?, unit)))
        .unwrap_or((text, 1));
    match number.trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok((number * unit as f64) as u64),
        _ => Err(anyhow!("expected a size, such as 8G or 512M")),
    }
}

/// Reads a limit for experts for clap: a size or a percentage.
fn expert_memory(s: &str) -> Result<ExpertMemory> {
    let Some(number) = s.trim().strip_suffix('%') else { return size(s).map(ExpertMemory::Bytes) };
    match number.trim().parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(ExpertMemory::Percent(percent)),
        _ => Err(anyhow!("expected a percentage above 0 and up to 100")),
    }
}

fn policy(s: &str) -> Result<PolicyKind> {
    let known = || PolicyKind::ALL.map(PolicyKind::name).join(", ");
    PolicyKind::parse(s).ok_or_else(|| anyhow!("there is {}", known()))
}

/// Reads `on` or `off` for clap.
pub fn on_off(s: &str) -> Result<bool> {
    match s {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(anyhow!("on or off")),
    }
}

/// Reads a number for clap.
pub fn at_least_one(s: &str) -> Result<usize> {
    match s.parse() {
        Ok(0) => Err(anyhow!("at least 1 is needed")),
        Ok(n) => Ok(n),
        Err(_) => Err(anyhow!("not a whole number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(size("4096").unwrap(), 4096);
        assert_eq!(size("8G").unwrap(), 8 << 30);
        assert_eq!(size("1.5gib").unwrap(), 3 << 29);
        assert_eq!(size("512 MB").unwrap(), 512 << 20);
        for wrong in ["", "G", "-1G", "8X", "nan", "inf"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(expert_memory("30%").unwrap(), ExpertMemory::Percent(30.0));
        assert_eq!(expert_memory("4M").unwrap(), ExpertMemory::Bytes(4 << 20));
        assert!(expert_memory("101%").is_err());
    }
}
