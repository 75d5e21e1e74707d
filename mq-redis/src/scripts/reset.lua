-- Moves a group without members. KEYS: stream, due, tries, notes of the topic. ARGV: group, start, longest idle time in ms of a living member.
-- Answer: 1 moved, 0 no such group, -1 it has members.
local stream, group = KEYS[1], ARGV[1]
local found = redis.pcall('XINFO', 'CONSUMERS', stream, group)
if found.err then
  return 0
end
for _, info in ipairs(found) do
  if info[2] ~= '~parked' and info[6] < tonumber(ARGV[3]) then
    return -1
  end
end
redis.call('XGROUP', 'DESTROY', stream, group)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('XGROUP', 'CREATE', stream, group, ARGV[2], 'ENTRIESREAD', index(stream, ARGV[2]))
begins(stream, KEYS[4], group)
return 1
