// The benchmark's networks in a session of this client.

/** Milliseconds of a step, and the first losses. */
export async function timeSession(Session, program, batch, steps, options) {
  const session = await Session.open(program, options);
  const losses = [];
  for (let index = 0; index < 5; index++) losses.push((await session.step(batch)).loss);
  const started = performance.now();
  for (let index = 0; index < steps; index++) await session.step(batch);
  const milliseconds = (performance.now() - started) / steps;
  await session.close();
  return { losses, milliseconds };
}
