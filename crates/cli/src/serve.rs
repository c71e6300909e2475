//! `forebay serve`: a server that speaks OpenAI's and Anthropic's APIs.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use forebay_engine::{Bytes, Engine, PrefixOptions, Prompter, Prospect};
use forebay_server::clients::{Client, Facts};
use forebay_server::{Running, Server, ServerOptions, model_name};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::args::{LoadArgs, ModelArgs, SamplingArgs, read_text};
use crate::config::SHOW_SETTINGS;
use crate::errors::in_flags;
use crate::output::print;
use crate::prompting::read_template;
use crate::values::{at_least_one, memory, on_off, size};
use crate::{interrupt, plan, pull};

/// Serve a model over the OpenAI and Anthropic APIs, with a chat page for browsers
///
/// The server answers several requests at once. It computes them together, so that one read of an expert serves all of them.
/// The answers are the same as if each request ran alone.
///
/// All conversations share the memory budget. The server reserves memory for --ctx tokens in total. Conversations that need
/// more take memory from the expert cache. If that is not enough, requests wait for each other.
///
/// The first Ctrl-C or SIGTERM stops accepting requests and waits for running answers. The second one stops at once.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay serve                                       the demo model, for this machine only
  forebay serve model.gguf --memory 16G --port 9000
  forebay serve model.gguf --memory 16G --plan        where everything would be, and how fast it would run
  forebay serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  forebay serve model.gguf --print-config opencode
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

docs/server.md describes the addresses, fields and errors.")]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Port; 0 picks a free one
    #[arg(long, value_name = "N", default_value_t = 8080, help_heading = SERVER)]
    port: u16,
    /// Address to listen on; 0.0.0.0 for all addresses of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = host, help_heading = SERVER)]
    host: IpAddr,
    /// Name of the model for clients [default: the name of its file]
    #[arg(short, long, value_name = "NAME", help_heading = SERVER)]
    alias: Option<String>,
    /// Answers generated at once; further requests wait. One client (an API key or, without keys, a connection) gets at most
    /// three quarters of them
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one, help_heading = SERVER)]
    parallel: usize,
    /// Maximum number of waiting requests; more are refused
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = SERVER)]
    queue: usize,
    /// Maximum size of a request
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = size, help_heading = SERVER)]
    max_body: u64,
    /// Maximum time for an answer, in seconds [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = at_least_one, help_heading = SERVER)]
    timeout: Option<usize>,
    /// Shutdown grace period in seconds; then the server ends running answers
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = SERVER)]
    drain: u64,
    /// Print the plan for a server with these flags, as `forebay plan` does, and exit
    #[arg(long, conflicts_with = "print_config", help_heading = SERVER)]
    plan: bool,
    /// Do not log requests
    #[arg(short, long, help_heading = SERVER)]
    quiet: bool,
    /// Print the configuration for a client of this server, or the settings in effect, and exit
    #[arg(long, value_name = "CLIENT", num_args = 0..=1, default_missing_value = SHOW_SETTINGS, value_parser = shown(),
        help_heading = SERVER)]
    print_config: Option<String>,
    /// API key that requests need (repeatable; other users can see it in the list of processes)
    #[arg(long, value_name = "KEY", help_heading = ACCESS)]
    api_key: Vec<String>,
    /// File with API keys, one per line
    #[arg(long, value_name = "FILE", help_heading = ACCESS)]
    api_key_file: Option<PathBuf>,
    /// Site whose pages may send requests, such as `https://example.org`, or * for all (repeatable)
    #[arg(long, value_name = "ORIGIN", help_heading = ACCESS)]
    cors_origin: Vec<String>,
    /// Maximum number of tokens per answer, even if a request asks for more [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", visible_aliases = ["n-predict", "predict"], value_name = "N",
        value_parser = at_least_one, help_heading = ANSWERS)]
    max_tokens: Option<usize>,
    /// Turn the model's reasoning on or off for requests that do not say, if its chat template supports that [default: the
    /// template's choice]
    #[arg(long, value_name = "on|off", value_parser = on_off(), hide_possible_values = true, help_heading = ANSWERS)]
    think: Option<bool>,
    /// Maximum number of reasoning tokens, even if a request asks for more; the model then has to answer [default: no limit]
    #[arg(long, value_name = "N", help_heading = ANSWERS)]
    think_budget: Option<usize>,
    /// Jinja chat template that replaces the model's
    #[arg(long, value_name = "FILE", help_heading = ANSWERS)]
    chat_template_file: Option<PathBuf>,
    /// Where to keep conversations, so that a prompt that continues one is not computed again
    #[arg(long, value_name = "WHERE", default_value = "on", value_enum, help_heading = PREFIXES)]
    prefix_cache: Keeping,
    /// Memory for kept conversations [default: one conversation of --ctx tokens, or a sixteenth of the budget]
    #[arg(long, value_name = "SIZE", value_parser = memory, help_heading = PREFIXES)]
    prefix_memory: Option<u64>,
    /// Disk space for kept conversations of all models
    #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = memory, help_heading = PREFIXES)]
    prefix_disk: u64,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

const SERVER: &str = "Server";
const ACCESS: &str = "Access";
const ANSWERS: &str = "Answers";
const PREFIXES: &str = "Prefix cache";

/// Where conversations are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Keeping {
    /// In memory and on disk
    #[value(name = "on")]
    OnDisk,
    /// In memory only
    #[value(name = "memory")]
    InMemory,
    /// Nowhere
    #[value(name = "off")]
    Nowhere,
}

impl ServeArgs {
    fn options(&self, keys: Vec<String>) -> ServerOptions {
        ServerOptions::new()
            .parallel(self.parallel)
            .queue(self.queue)
            .max_body(self.max_body)
            .max_tokens(self.max_tokens)
            .max_reasoning(self.think_budget)
            .timeout(self.timeout.map(|seconds| Duration::from_secs(seconds as u64)))
            .keys(keys)
            .origins(self.cors_origin.clone())
            .words(in_flags)
    }

    /// The keys of the command line, and those of a file with one on each line.
    fn keys(&self) -> Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            let text = read_text(path)?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
            keys.extend(lines.map(str::to_owned));
            if keys.is_empty() {
                bail!("{} contains no key: write one key on each line", path.display());
            }
        }
        if keys.iter().any(|key| key.trim().is_empty()) {
            bail!("a key is empty: give --api-key and the lines of --api-key-file some text");
        }
        Ok(keys)
    }

    fn prompter(&self, engine: &Engine) -> Result<Prompter> {
        let template = match &self.chat_template_file {
            Some(file) => Some(Arc::new(read_template(file, engine)?)),
            None => None,
        };
        let prompter = Prompter::new(engine).with_template(template).with_think(self.think);
        Ok(prompter.with_sampling(self.sampling.overrides()))
    }

    fn prefixes(&self, engine: &Engine) -> Option<PrefixOptions> {
        let folder = match self.prefix_cache {
            Keeping::OnDisk => forebay_hub::cache_folder("prefixes"),
            Keeping::InMemory => None,
            Keeping::Nowhere => return None,
        };
        let mut options = PrefixOptions::new(engine, folder);
        options.memory = self.prefix_memory.unwrap_or(options.memory);
        options.disk = self.prefix_disk;
        Some(options)
    }

    /// Why no model takes the sampling parameters.
    pub fn refusal(&self) -> Option<forebay_engine::Error> {
        self.sampling.refusal()
    }

    /// Whether requests are logged.
    pub fn is_quiet(&self) -> bool {
        // A plan is no server's log.
        self.quiet || self.plan
    }
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    args.sampling.check()?;
    if args.plan {
        return plan::show(&plan::Request {
            model: args.model.get()?,
            load: &args.load.with_open_requests(args.parallel + args.queue),
            probe: true,
            json: false,
            answers: Some(args.parallel),
        });
    }
    let keys = args.keys()?;
    let model = args.model.get()?;
    let path = pull::locate_or_demo(model)?;
    let name = args.alias.clone().unwrap_or_else(|| model_name(model, &path));
    let is_open = keys.is_empty();
    let shown = args.print_config.as_deref();
    if let Some(client) = Client::ALL.into_iter().find(|client| shown == Some(client.name())) {
        return print_config(args, client, &path, name, !is_open);
    }
    let server = Server::new(&name, args.options(keys))?;
    let runtime = forebay_server::runtime().context("cannot start the server's threads")?;
    let code = runtime.block_on(serve(args, &server, &name, path, is_open));
    // Running answers do not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

/// The values of `--print-config`.
fn shown() -> PossibleValuesParser {
    PossibleValuesParser::new(Client::ALL.map(Client::name).into_iter().chain([SHOW_SETTINGS]))
}

/// Prints the configuration of a client. The model is not loaded.
fn print_config(
    args: &ServeArgs,
    client: Client,
    path: &Path,
    model: String,
    needs_key: bool,
) -> Result<ExitCode> {
    let context = Prospect::new(path, &args.load.options())?.plan().context;
    let facts =
        Facts { host: args.host, port: args.port, model, context, max_tokens: args.max_tokens, needs_key };
    let configuration = client.configuration(&facts);
    eprintln!("Configuration for {}:", configuration.place);
    print(&configuration.text)?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(
    args: &ServeArgs,
    server: &Server,
    name: &str,
    path: PathBuf,
    is_open: bool,
) -> Result<ExitCode> {
    let drain = Duration::from_secs(args.drain);
    let mut signals = Signals::listen(drain.saturating_add(LAST_WORDS + LAST_WORK))?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen at {address}: choose another port with --port"))?;
    let address = listener.local_addr().context("cannot find out which address the server listens at")?;
    eprintln!("Listening at http://{address}");
    if is_open && !address.ip().is_loopback() {
        eprintln!(
            "warning: everybody who can reach this machine can use the server: set a key with --api-key-file"
        );
    }
    let mut connections = server.listen(listener);
    let mut lost = None;
    let running = loop {
        let mut running = match load(args, server, &path, lost, &mut signals).await {
            Ok(Some(running)) => running,
            Ok(None) => return Ok(ExitCode::SUCCESS),
            Err(error) => {
                // Waiting clients get an error.
                server.drain();
                connections.close(LAST_WORDS).await;
                return Err(error);
            }
        };
        eprintln!("{}", welcome(name, args.parallel, running.driver.engine(), address));
        let leaving = tokio::select! {
            () = signals.next() => true,
            () = running.ended() => false,
        };
        match running.driver.engine().lost() {
            _ if leaving => break running,
            Some(why) => lost = Some(why.to_owned()),
            // The driver panicked. A supervisor can restart the program; this process can answer nothing any more.
            None => {
                server.drain();
                connections.close(LAST_WORDS).await;
                bail!("the compute thread has panicked, which is a bug (see above): restart the server");
            }
        }
        server.unload();
    };
    let start = Instant::now();
    eprintln!("Shutting down: waiting for running answers. Press Ctrl-C again to stop at once.");
    server.drain();
    let drained = connections.close(drain).await;
    if !drained {
        eprintln!(
            "Some answers were not complete after {} seconds (--drain); their clients were told.",
            args.drain
        );
        server.abandon();
        connections.close(LAST_WORDS).await;
    }
    if drained {
        running.driver.close()
    } else {
        running.driver.leave()
    }
    // Meanwhile the prefix cache is written.
    let left = (drain + LAST_WORK).saturating_sub(start.elapsed());
    let joined = tokio::task::spawn_blocking(move || running.driver.join());
    match timeout(left, joined).await {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(_) => bail!("the compute thread did not end in time and was stopped"),
    }
}

/// Time to send the last errors to clients.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Time for the compute thread to end after the last answer or after the grace period.
const LAST_WORK: Duration = Duration::from_secs(10);

/// Loads the model and starts the driver; meanwhile requests get 503. `None` if a signal comes first. After the loss of a GPU, the
/// model is loaded for the CPU, if that is allowed.
async fn load(
    args: &ServeArgs,
    server: &Server,
    path: &Path,
    lost: Option<String>,
    signals: &mut Signals,
) -> Result<Option<Running>> {
    let (sender, loaded) = oneshot::channel();
    server.tell_loading(0, 0);
    let told = server.clone();
    let observer = Arc::new(move |done, total| told.tell_loading(done, total));
    let load = args.load.with_open_requests(args.parallel + args.queue).with_observer(observer);
    let path = path.to_owned();
    std::thread::Builder::new()
        .name("loader".into())
        .spawn(move || {
            let engine = match lost {
                None => load.load(&path),
                Some(why) => load.load_after(&why, &path),
            };
            // The receiver is gone only if the program is ending.
            let _ = sender.send(engine);
        })
        .context("cannot start a thread")?;
    let engine = tokio::select! {
        engine = loaded => engine.context("the thread that loads the model has panicked")??,
        // The loader is abandoned.
        () = signals.next() => return Ok(None),
    };
    Ok(Some(server.start(args.prompter(&engine)?, args.prefixes(&engine))?))
}

fn welcome(name: &str, parallel: usize, engine: &Engine, address: SocketAddr) -> String {
    let plan = engine.plan();
    let budget = match plan.budget {
        u64::MAX => String::new(),
        budget => format!(" of {}", Bytes(budget)),
    };
    let streams = if let Some(device) = &plan.device {
        let (planned, budget) = (Bytes(device.total()), Bytes(device.budget));
        match plan.device_holds_all_experts() {
            true => format!("all weights in GPU memory ({planned} of {budget})"),
            false => format!(
                "{} of {} experts in GPU memory ({planned} of {budget})",
                device.slot_count(),
                plan.expert_count
            ),
        }
    } else if plan.holds_all_experts() {
        "all experts in memory".to_owned()
    } else {
        format!(
            "{} of {} of experts in memory, the others streamed",
            Bytes(plan.slot_bytes),
            Bytes(plan.experts)
        )
    };
    format!(
        "  model    {name}\n  context  {} tokens, {parallel} answers at once\n  memory   {}{budget}: {streams}\n  page     \
         http://{address}/\n  try      curl http://{address}/v1/chat/completions -d '{{\"messages\": [{{\"role\": \"user\", \
         \"content\": \"Hello\"}}]}}'",
        engine.context(),
        Bytes(plan.total()),
    )
}

fn host(text: &str) -> Result<IpAddr> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        text => text
            .parse()
            .map_err(|_| anyhow!("expected an address of this machine, such as 127.0.0.1 or 0.0.0.0")),
    }
}

/// Ctrl-C and SIGTERM, handled on a thread of their own, so that the program ends even if something else hangs.
struct Signals(UnboundedReceiver<()>);

impl Signals {
    /// Handles signals from now on. A second signal ends the program at once, and so does the time `longest` after the first one.
    fn listen(longest: Duration) -> Result<Signals> {
        let (sender, receiver) = unbounded_channel();
        let (ready, listens) = std::sync::mpsc::channel();
        let hear = async move {
            let mut source = match SignalSource::listen() {
                Ok(source) => source,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(()));
            source.next().await;
            // If nobody receives it, the program ends after `longest`.
            let _ = sender.send(());
            // Nothing is printed here: writing to stderr may be what hangs.
            match timeout(longest, source.next()).await {
                Ok(()) => std::process::exit(interrupt::EXIT_CODE.into()),
                Err(_) => std::process::exit(1),
            }
        };
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                if let Ok(runtime) = runtime {
                    runtime.block_on(hear);
                }
            })
            .context("cannot start a thread")?;
        listens.recv().context("cannot listen for signals")??;
        Ok(Signals(receiver))
    }

    /// Waits for the first signal.
    async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

/// The source of signals.
#[cfg(unix)]
struct SignalSource {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl SignalSource {
    fn listen() -> Result<SignalSource> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(SignalSource {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Ctrl-C.
#[cfg(not(unix))]
struct SignalSource;

#[cfg(not(unix))]
impl SignalSource {
    fn listen() -> Result<SignalSource> {
        Ok(SignalSource)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_engine::ChatRequest;
    use forebay_server::{Body, Caller, http};

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        serve: ServeArgs,
    }

    fn args(flags: &[&str]) -> ServeArgs {
        <Cli as clap::Parser>::parse_from([&["serve"], flags].concat()).serve
    }

    /// Whoever supervises the program is to notice.
    #[test]
    fn a_panic_of_the_driver_ends_the_server_with_an_error() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
        let args = args(&["--port", "0", "--prefix-cache", "off", "--device", "cpu", "--threads", "1"]);
        let server = Server::new("tales", args.options(Vec::new())).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let serving = runtime.spawn({
            let server = server.clone();
            async move { serve(&args, &server, "tales", path, true).await }
        });
        let driver = loop {
            match server.driver() {
                Some(driver) => break driver,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            assert!(!serving.is_finished(), "it does not come up");
        };
        let question = driver.prompter().chat(ChatRequest::user("Hello").max_tokens(2)).unwrap();
        let _ticket = driver.ask_telling(question, |_| panic!("as the test wants it")).unwrap();
        drop(driver);
        let error = runtime.block_on(serving).unwrap().unwrap_err().to_string();
        assert!(error.contains("restart the server"), "{error}");
        let request = http::Request::get("/ready").body(Body::empty()).unwrap();
        let answer = runtime.block_on(server.handle(request, Caller::trusted()));
        assert_eq!(answer.status(), 503, "whoever came meanwhile was told");
    }

    #[test]
    fn keys_come_from_the_command_line_and_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let file = path.to_str().unwrap();
        std::fs::write(&path, "# ours\nthird\n\n fourth \n").unwrap();
        let keys = args(&["--api-key", "first", "--api-key", "second", "--api-key-file", file]).keys();
        assert_eq!(keys.unwrap(), ["first", "second", "third", "fourth"]);
        assert!(args(&[]).keys().unwrap().is_empty());
        std::fs::write(&path, "\n# nothing\n").unwrap();
        assert!(args(&["--api-key-file", file]).keys().is_err());
        assert!(args(&["--api-key", " "]).keys().is_err());
    }
}
