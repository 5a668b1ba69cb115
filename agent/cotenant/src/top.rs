//! Owns `cotenant top`: the node live in a terminal, by the agent's own figures.
//! Refuses to probe: what the agent does not know is a dash here.

mod rates;
mod screen;

use std::{
    io::{IsTerminal, stdout},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use cotenant_model::explain::Explanation;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde::Deserialize;

use crate::{
    client::{AskError, Place},
    discovery::chain,
    snapshot::Snapshot,
};
use rates::Order;

/// Closed incidents are of interest for so long.
const INCIDENTS: &str = "/api/v1/incidents?since=15m";
const NODE: &str = "/api/v1/node";
/// How soon a key is answered.
const KEYS: Duration = Duration::from_millis(100);
/// The agent's figures are a second old at the most: more often shows nothing new.
const SHORTEST: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Time between two looks, such as 2s; rates are of this time
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// What the tenants are ordered by
    #[arg(long, value_enum, default_value_t)]
    sort: Order,
    /// Look twice, print one table and leave; so it is, too, where the output is no terminal
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    place: Place,
}

fn interval(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(interval) if interval >= SHORTEST => Ok(interval),
        Ok(_) => Err("the agent looks once a second: 1s or more".to_owned()),
        Err(error) => Err(format!("{error}; write a duration such as 2s")),
    }
}

/// One look at the node.
#[derive(Clone, Debug)]
struct Look {
    node: Snapshot,
    incidents: Vec<Told>,
}

#[derive(Deserialize)]
struct Incidents {
    incidents: Vec<Told>,
}

#[derive(Clone, Debug, Deserialize)]
struct Told {
    /// `open` or `closed`.
    state: String,
    explanation: Explanation,
}

pub(crate) fn top(options: &Options) -> Result<()> {
    let address = options.place.address()?;
    let first = look(&options.place, &address)?;
    if options.once || !stdout().is_terminal() {
        thread::sleep(options.interval);
        let second = look(&options.place, &address)?;
        print!("{}", screen::text(Some(&first), &second, options.sort));
        return Ok(());
    }
    let (looks, coming) = channel();
    let (place, interval) = (options.place.clone(), options.interval);
    let asked = address.clone();
    // An agent that does not answer must not make keys wait.
    thread::Builder::new().name("looks".to_owned()).spawn(move || watch(&place, &asked, interval, &looks))?;
    ratatui::run(|terminal| live(terminal, first, &coming, &address, options.sort))
}

fn look(place: &Place, address: &str) -> Result<Look, AskError> {
    let malformed = |source| AskError::Malformed { address: address.to_owned(), source };
    let node = serde_json::from_str(&place.ask(address, NODE)?).map_err(malformed)?;
    let Incidents { incidents } = serde_json::from_str(&place.ask(address, INCIDENTS)?).map_err(malformed)?;
    Ok(Look { node, incidents })
}

fn watch(place: &Place, address: &str, interval: Duration, looks: &Sender<Result<Look, String>>) {
    loop {
        thread::sleep(interval);
        let look = look(place, address).map_err(|error| chain(&error));
        if looks.send(look).is_err() {
            return;
        }
    }
}

/// Draws until it is told to leave.
fn live(
    terminal: &mut ratatui::DefaultTerminal,
    first: Look,
    coming: &Receiver<Result<Look, String>>,
    address: &str,
    mut order: Order,
) -> Result<()> {
    let (mut before, mut now): (Option<Look>, Look) = (None, first);
    let (mut silent, mut since, mut skipped, mut held) = (None::<String>, Instant::now(), 0_usize, false);
    loop {
        while let Ok(look) = coming.try_recv() {
            match look {
                // Who holds the picture wants to read it.
                Ok(_) if held => {}
                Ok(look) => {
                    before = Some(std::mem::replace(&mut now, look));
                    (silent, since) = (None, Instant::now());
                }
                Err(reason) => silent = Some(reason),
            }
        }
        let state = match (&silent, held) {
            (Some(reason), _) => format!("NO ANSWER for {} s: {reason}", since.elapsed().as_secs()),
            (None, true) => "held".to_owned(),
            (None, false) => String::new(),
        };
        terminal.draw(|frame| {
            let view =
                screen::View { before: before.as_ref(), now: &now, order, address, state: &state, skipped };
            skipped = view.draw(frame.area(), frame.buffer_mut());
        })?;
        if !event::poll(KEYS)? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        if key.kind != KeyEventKind::Press {
            continue;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
            KeyCode::Char('s') => order = order.next(),
            KeyCode::Char(' ') => held = !held,
            KeyCode::Down | KeyCode::Char('j') => skipped += 1,
            KeyCode::Up | KeyCode::Char('k') => skipped = skipped.saturating_sub(1),
            KeyCode::PageDown => skipped += 10,
            KeyCode::PageUp => skipped = skipped.saturating_sub(10),
            KeyCode::Home => skipped = 0,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_below_the_agents_own_is_refused_with_a_reason() {
        assert_eq!(interval("2s"), Ok(Duration::from_secs(2)));
        assert!(interval("200ms").unwrap_err().contains("once a second"));
        assert!(interval("2").unwrap_err().contains("such as 2s"));
    }
}
