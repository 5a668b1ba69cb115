//! Owns the claims about the served endpoint: who gets in, by what, and what clients that behave badly cost the others.
//! Refuses a client of the agent's own making alone: curl and openssl ask too.

mod certificates;
mod configuration;
mod crowds;
mod liveness;
mod papers;
mod passwords;
mod served;
