//! Owns `cotenant record`: a recording of what the forecast of a running agent consumes, by its HTTP address.
//! Refuses to write a block that is not whole.
//!
//! The agent streams the file itself, block by block: nothing is configured or restarted to record, and the first
//! block is what the forecaster knows already, so that a replay goes on exactly where the agent was.

mod tap;

use std::{
    fs::File,
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use http_body_util::BodyExt;
use tokio::time::Instant;

pub(crate) use tap::Tap;

use crate::client::{Access, Told};

/// At the end, the block that the agent is filling is waited for: ten moments. A second interrupt ends at once.
const LAST: Duration = Duration::from_secs(15);
/// Where the agent streams.
pub(crate) const PATH: &str = "/api/v1/recording";

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// File to write; must not exist
    file: PathBuf,
    /// How long to record, such as 90s or 1h [default: until interrupted]
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    duration: Option<Duration>,
    /// Address of the agent
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9468")]
    from: SocketAddr,
    #[command(flatten)]
    access: Access,
}

pub(crate) fn record(options: &Options) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let file = File::create_new(&options.file)
        .with_context(|| format!("cannot make {}: is it there already?", options.file.display()))?;
    let blocks = runtime.block_on(stream(options, file))?;
    eprintln!("{}: {blocks} blocks", options.file.display());
    Ok(())
}

/// Copies blocks until the time is over; gives how many there were.
async fn stream(options: &Options, mut file: File) -> Result<u64> {
    let from = options.from;
    let answer = options.access.ask(&from.to_string(), PATH).await.with_context(|| {
        format!("no agent answers at {from}: start one with cotenant run, or name its address")
    })?;
    if !answer.status().is_success() {
        let status = answer.status();
        let told = Told { status: status.as_u16(), text: String::new() };
        let remedy = told.remedy().unwrap_or("is it of this version, and in plain HTTP (else give --ca)?");
        bail!("the agent at {from} refuses to record: {status}; {remedy}");
    }
    let mut body = answer.into_body();
    let end = options.duration.map(|duration| Instant::now() + duration);
    let (mut pending, mut blocks, mut begun) = (Vec::new(), 0, false);
    let (mut until, mut ending) = (end, false);
    loop {
        let over = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let frame = tokio::select! {
            frame = body.frame() => Some(frame),
            () = over => None,
            _ = tokio::signal::ctrl_c() => None,
        };
        let Some(frame) = frame else {
            if ending {
                return Ok(blocks);
            }
            // What came up to now is in the block that the agent is filling.
            (until, ending) = (Some(Instant::now() + LAST), true);
            continue;
        };
        let Some(frame) = frame else {
            if ending {
                return Ok(blocks);
            }
            bail!(
                "the agent ended the stream after {blocks} blocks: it stopped, or this host writes too slowly"
            );
        };
        if let Ok(data) = frame.context("the stream broke off")?.into_data() {
            pending.extend_from_slice(&data);
        }
        if !begun && pending.len() >= cotenant_recording::head().len() {
            put(
                &mut file,
                &options.file,
                &pending.drain(..cotenant_recording::head().len()).collect::<Vec<u8>>(),
            )?;
            begun = true;
        }
        while begun && let Some(length) = whole(&pending) {
            put(&mut file, &options.file, &pending.drain(..length).collect::<Vec<u8>>())?;
            blocks += 1;
            if ending {
                return Ok(blocks);
            }
        }
    }
}

/// The length of the first block, when all of it is here.
fn whole(pending: &[u8]) -> Option<usize> {
    let length = u32::from_le_bytes(pending.first_chunk::<4>().copied()?) as usize + 8;
    (pending.len() >= length).then_some(length)
}

fn put(file: &mut File, path: &Path, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).with_context(|| format!("cannot write {}: is the disk full?", path.display()))
}
