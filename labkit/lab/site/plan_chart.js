// The picture of a plan: a bar for each ceiling on a logarithmic scale, the scarcest first, and what the GPUs ask for.

const SVG = "http://www.w3.org/2000/svg";
const [ROW, TOP, EDGE] = [44, 26, 8]; // pixels

function svgElement(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// Images/s -> pixels from the left.
function scale(rows, demand, width) {
  const limits = [...rows, demand].flatMap((row) => [row.low, row.high]);
  const [low, high] = [Math.log10(Math.min(...limits)) - 0.3, Math.log10(Math.max(...limits)) + 0.1];
  return (value) => EDGE + ((Math.log10(value) - low) / (high - low)) * (width - 2 * EDGE);
}

function bar(row, at, x) {
  const y = TOP + at * ROW;
  const [text, middle] = [`${row.quantity}: ${labkitPlan.format_number(row.value)}`, y + 27];
  return [
    svgElement("text", { x: EDGE, y: y + 14 }, text),
    svgElement("rect", { x: EDGE, y: y + 20, width: Math.max(1, x(row.value) - EDGE), height: 14, fill: "url(#plan-hatch)" }),
    svgElement("path", {
      d: `M${x(row.low)} ${middle}H${x(row.high)}M${x(row.low)} ${middle - 5}v10M${x(row.high)} ${middle - 5}v10`,
      stroke: "var(--plan-text)", "stroke-width": 1.5, fill: "none",
    }),
  ];
}

function demandMark(demand, x, height, width) {
  const [left, at, right] = [demand.low, demand.value, demand.high].map(x);
  const text = `the GPUs ask for ${labkitPlan.format_number(demand.value)}`;
  const place = at > width / 2 ? { x: at - 6, "text-anchor": "end" } : { x: at + 6 };
  return [
    svgElement("rect", { x: left, y: TOP - 4, width: right - left, height: height - TOP, fill: "var(--plan-demand)", opacity: 0.15 }),
    svgElement("path", { d: `M${at} 2V${height - 4}`, stroke: "var(--plan-demand)", "stroke-width": 2 }),
    svgElement("text", { ...place, y: 14 }, text),
  ];
}

function hatch() {
  const pattern = svgElement("pattern", { id: "plan-hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(
    svgElement("rect", { width: 6, height: 6, fill: "var(--plan-bar)" }),
    svgElement("path", { d: "M0 0V6", stroke: "var(--plan-back)", "stroke-width": 1.5 }),
  );
  const made = svgElement("defs", {});
  made.append(pattern);
  return made;
}

function drawChart(place, plan) {
  const rows = plan.lines.filter((line) => line.group === "ceiling" && line.name !== "gpu_ceiling");
  rows.sort((a, b) => a.value - b.value);
  const demand = plan.lines.find((line) => line.name === "demand");
  const width = Math.max(200, place.clientWidth || 600);
  const height = TOP + rows.length * ROW + 8;
  const x = scale(rows, demand, width);
  const words = rows.map((row) => `${row.quantity} ${labkitPlan.format_number(row.value)}`).join("; ");
  const svg = svgElement("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `Predicted images/s at most: ${words}. The GPUs ask for ${labkitPlan.format_number(demand.value)}.`);
  svg.append(hatch(), ...demandMark(demand, x, height, width), ...rows.flatMap((row, at) => bar(row, at, x)));
  place.replaceChildren(svg);
}
