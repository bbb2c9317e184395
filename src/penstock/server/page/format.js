// Figures as text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** Seconds in the unit that reads best, three digits: "870 µs", "12.4 ms", "3.05 s", "2 h 5 min". */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 100) return `${digits(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${count(Math.floor(value / 3600))} h ${Math.floor((value % 3600) / 60)} min`;
}

/** Three digits, or a whole number where it has more. */
export function digits(value) {
  if (value >= 99.95 || value === 0) return count(value);
  return value.toFixed(value >= 9.995 ? 1 : 2);
}

export const percent = (share) => `${count(share * 100)}%`;

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The smallest value that at least a share p of the values doesn't exceed (nearest rank). */
export function percentile(values, p) {
  if (!values.length) return NaN;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.max(0, Math.ceil(p * sorted.length) - 1)];
}
